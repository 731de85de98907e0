#!/usr/bin/env bash
# Starts run_train_uniref50_ddp.py, one process per GPU of this machine; without a GPU, two CPU
# processes. The data are read first, unless an earlier run has read them.
#
# Usage: ./run_train_uniref50_ddp.sh [options] [options of run_train_uniref50_ddp.py ...]
#   -w, --work-dir DIR   checkpoints, metrics; a run found there is resumed
#   -c, --config FILE    YAML or JSON (default: configs/config_uniref50_ddp.yaml)
#   -d, --datafile PATH  proteins: FASTA, a sequence a line, or a table
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
# first one's name) and perhaps MASTER_PORT set (else 29500, in a SLURM job a port of its own).
set -euo pipefail

here=$(dirname -- "${BASH_SOURCE[0]}")
# shellcheck source=scripts/start_torchrun.sh
source "$here/scripts/start_torchrun.sh"

config=configs/config_uniref50_ddp.yaml
[[ -f $config ]] || config=$here/$config
options=()
processes=all
while (($#)); do
    name=${1%%=*}
    value=${1#"$name"} # =VALUE, or nothing where the value is the next word
    case $name in
        -h | --help) show_usage ;;
        -w | --work-dir) options+=("--output_dir$value") ;;
        -c | --config)
            options+=("--config$value")
            config=
            ;;
        -d) options+=("--datafile$value") ;;
        -p | --project) options+=("--wandb_project$value") ;;
        -n | --name) options+=("--wandb_name$value") ;;
        -s) options+=("--seed$value") ;;
        -m | --method) options+=("--sampling_method$value") ;;
        --gpus)
            processes=${value#=}
            if [[ -z $value && $# -gt 1 ]]; then
                processes=$2
                shift
            fi
            ;;
        --yes | -y) ;;
        *) options+=("$1") ;;
    esac
    shift
done

[[ -z $config ]] || options=(--config="$config" "${options[@]}")
count_devices "${options[@]}"
if [[ $processes == all ]]; then
    processes=$((gpus > 0 ? gpus : cores < 2 ? cores : 2))
fi
[[ $processes =~ ^[1-9][0-9]{0,3}$ ]] || die "--gpus must be a whole number, not '$processes'"
((processes <= most)) || die "--gpus is $processes but here are $gpus GPU(s), $cores CPU core(s)"

# one process checks the options and reads the data, before there are processes that would wait
alone=(RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 MASTER_ADDR=localhost MASTER_PORT=0)
env "${alone[@]}" python "$here/run_train_uniref50_ddp.py" "${options[@]}" --prepare_only || exit $?
start_torchrun "$processes" "$here/run_train_uniref50_ddp.py" "${options[@]}"
