#!/usr/bin/env bash
# Starts run_train_uniref50_ddp.py, one process per GPU of this machine; without a GPU, two CPU
# processes. A file of sequences that is not prepared yet is prepared first.
#
# Usage: ./run_train_uniref50_ddp.sh [options] [options of run_train_uniref50_ddp.py ...]
#   -w, --work-dir DIR   checkpoints, metrics, samples; a run found there is resumed
#   -c, --config FILE    YAML or JSON (default: configs/config_uniref50_ddp.yaml)
#   -d, --datafile PATH  folder of tools/prepare_uniref50.py, or FASTA, text (also .gz), .pt
#   -p, --project NAME   wandb project
#   -n, --name NAME      wandb name
#   -s, --seed N         seed
#   -m, --method NAME    samples at evaluations: rigorous or simple
#       --fresh          start anew; the old run is moved aside
#       --gpus N         processes on this machine (default: one per visible GPU)
#       --yes            accepted, with no effect: nothing is asked
#   -h, --help           this text
# Examples:
#   ./run_train_uniref50_ddp.sh --config configs/config_uniref50_quickstart.yaml
#   ./run_train_uniref50_ddp.sh -d input_data/uniref50 --fresh --project proteins --name first
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
gpus=''
options=()
while (($#)); do
    word=${1%%=*}
    value=''
    case $word in # those with a value, written --name VALUE or --name=VALUE
        -w | --work-dir | -c | --config | -d | --datafile | -p | --project | -n | --name | -s | \
            --seed | -m | --method | --gpus)
            if [[ $1 == *=* ]]; then
                value=${1#*=}
            elif (($# > 1)) && [[ $2 != -* ]]; then
                value=$2
                shift
            fi
            [[ -n $value ]] || die "$word needs a value; see --help"
            ;;
    esac
    case $word in
        -h | --help)
            sed -n '2,/^set /{s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}"
            exit 0
            ;;
        -w | --work-dir) options+=(--output_dir="$value") ;;
        -c | --config) config=$value ;;
        -d | --datafile) options+=(--datafile="$value") ;;
        -p | --project) options+=(--wandb_project="$value") ;;
        -n | --name) options+=(--wandb_name="$value") ;;
        -s | --seed) options+=(--seed="$value") ;;
        -m | --method) options+=(--sampling_method="$value") ;;
        --gpus) gpus=$value ;;
        --yes | -y | --) ;;
        *) options+=("$1") ;;
    esac
    shift
done
options=(--config="$config" ${options[@]+"${options[@]}"})
[[ $gpus =~ ^([1-9][0-9]{0,3})?$ ]] || die "--gpus must be a whole number from 1, not '$gpus'"

command -v torchrun >/dev/null || die "no torchrun on PATH: activate the environment that has torch"
cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)
visible=0
if ! [[ " ${options[*]} " =~ device[\ =]cpu\  ]]; then
    visible=$(python -c 'import torch; print(torch.accelerator.device_count())') ||
        die "python on PATH has no working torch"
fi
if ((visible > 0)); then
    gpus=${gpus:-$visible}
    ((gpus <= visible)) || die "--gpus is $gpus but $visible GPU(s) are visible: --gpus $visible"
else
    gpus=${gpus:-$((cores > 1 ? 2 : 1))}
    ((gpus <= cores)) || die "--gpus is $gpus but there is no GPU and $cores CPU core(s): --gpus $cores"
fi

where=(--standalone) # on any free port: two runs on one machine do not collide
if [[ ${NNODES:-1} != 1 ]]; then
    for name in NODE_RANK MASTER_ADDR; do
        [[ -n ${!name:-} ]] || die "with NNODES=$NNODES set $name, too"
    done
    where=(--nnodes="$NNODES" --node_rank="$NODE_RANK" --master_addr="$MASTER_ADDR"
        --master_port="${MASTER_PORT:-29500}")
fi

# the script checks its options, and prepares a file, before there are processes that would wait
python "$here/run_train_uniref50_ddp.py" "${options[@]}" --prepare_only || exit $?

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # or restarted processes look for the dead ones
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(((cores + gpus - 1) / gpus))} # torchrun would say 1
# SIGUSR1 (a batch queue's warning) reaches the processes, which then have 120 s to save
exec torchrun "${where[@]}" --nproc_per_node="$gpus" --shutdown-timeout=120 \
    --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
    "$here/run_train_uniref50_ddp.py" "${options[@]}"
