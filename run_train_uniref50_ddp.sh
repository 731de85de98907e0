#!/usr/bin/env bash
# Starts run_train_uniref50_ddp.py, one process per GPU of this machine; without a GPU, two CPU
# processes. The data are read first, unless an earlier run has read them.
#
# Usage: ./run_train_uniref50_ddp.sh [options] [options of run_train_uniref50_ddp.py ...]
#   -w, --work-dir DIR   checkpoints, metrics; a run found there is resumed
#   -c, --config FILE    YAML or JSON (default: configs/config_uniref50_ddp.yaml)
#   -d, --datafile PATH  FASTA, or a sequence a line (also .gz .bz2 .xz .zst); .pt
#   -p, --project NAME   wandb project
#   -n, --name NAME      wandb name
#   -s, --seed N         seed
#   -m, --method NAME    of tools/sample_uniref50.py: rigorous or simple
#       --fresh          start anew; the old run is moved aside
#       --gpus N         processes on this machine (default: one per visible GPU)
#       --yes            accepted, with no effect: nothing is asked
#   -h, --help           this text
# Examples:
#   ./run_train_uniref50_ddp.sh --config configs/config_uniref50_quickstart.yaml
#   ./run_train_uniref50_ddp.sh -d uniref50.fasta.gz --fresh --project proteins --name first
#   CUDA_VISIBLE_DEVICES=2,3 ./run_train_uniref50_ddp.sh -d proteins.fasta --batch_size=8
# Several machines: the same line on each, with NNODES, NODE_RANK (0 on the first), MASTER_ADDR (the
# first one's name) and, if it is not 29500, MASTER_PORT set.
set -euo pipefail

die() {
    printf 'run_train_uniref50_ddp.sh: %s\n' "$1" >&2
    exit 2
}

here=$(dirname -- "${BASH_SOURCE[0]}")
config=configs/config_uniref50_ddp.yaml
[[ -f $config ]] || config=$here/$config
options=(--config="$config") # of two the script takes the last one
gpus=all
while (($#)); do
    name=${1%%=*}
    value=${1#"$name"} # =VALUE, or nothing where the value is the next word
    case $name in
        -h | --help)
            sed -n '2,/^set /{s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}"
            exit 0
            ;;
        -w | --work-dir) options+=("--output_dir$value") ;;
        -c) options+=("--config$value") ;;
        -d) options+=("--datafile$value") ;;
        -p | --project) options+=("--wandb_project$value") ;;
        -n | --name) options+=("--wandb_name$value") ;;
        -s) options+=("--seed$value") ;;
        -m | --method) options+=("--sampling_method$value") ;;
        --gpus)
            gpus=${value#=}
            if [[ -z $value && $# -gt 1 ]]; then
                gpus=$2
                shift
            fi
            ;;
        --yes | -y) ;;
        *) options+=("$1") ;;
    esac
    shift
done

cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)
visible=0
if ! [[ " ${options[*]} " =~ device[\ =]cpu\  ]]; then
    visible=$(python -c 'import torch; print(torch.accelerator.device_count())')
fi
most=$((visible > 0 ? visible : cores))
if [[ $gpus == all ]]; then
    gpus=$((visible > 0 ? visible : cores < 2 ? cores : 2))
fi
[[ $gpus =~ ^[1-9][0-9]{0,3}$ ]] || die "--gpus must be a whole number from 1, not '$gpus'"
((gpus <= most)) || die "--gpus is $gpus but here are $visible GPU(s), $cores CPU core(s)"

# One machine: on any free port, so that two runs do not collide; the host's name need not resolve.
where=(--standalone --local-addr=127.0.0.1)
if [[ ${NNODES:-1} != 1 ]]; then
    port=29500
    [[ -z ${SLURM_JOB_ID:-} ]] || port=$((10000 + SLURM_JOB_ID % 20000)) # each job has its own
    where=(--nnodes="$NNODES" --node_rank="${NODE_RANK:?with NNODES set it, too}"
        --master_addr="${MASTER_ADDR:?with NNODES set it, too}"
        --master_port="${MASTER_PORT:-$port}")
fi

# one process checks the options and reads the data, before there are processes that would wait
python "$here/run_train_uniref50_ddp.py" "${options[@]}" --prepare_only || exit $?

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # or restarted processes look for the dead ones
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-120} # torchrun would say 30
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(((cores + gpus - 1) / gpus))} # torchrun would say 1
signals=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1
[[ -z $(trap -p HUP) ]] || signals=${signals/SIGHUP,/} # ignored, as nohup has it: the run goes on
# SIGUSR1 (a batch queue's warning) reaches the processes, which then have 120 s to save
exec torchrun "${where[@]}" --nproc_per_node="$gpus" \
    --signals-to-handle="$signals" \
    "$here/run_train_uniref50_ddp.py" "${options[@]}"
