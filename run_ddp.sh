#!/usr/bin/env bash
# Starts train_ddp.py, one process per GPU of this machine.
#
# Usage: ./run_ddp.sh [NGPUS=8] [USE_PROJECTION=True] [options of train_ddp.py ...]
#
#   NGPUS           processes to start on this machine: at most the GPUs that are visible
#                   (CUDA_VISIBLE_DEVICES, nvidia-smi, ZE_AFFINITY_MASK, else what torch sees);
#                   without a GPU, or with --device cpu, at most the CPU cores
#   USE_PROJECTION  True: projection layer, False: MRL mode
#
# Examples:
#   ./run_ddp.sh 8 True
#   ./run_ddp.sh 4 False --batch_size=128 --skip_phase1
#   CUDA_VISIBLE_DEVICES=2,3 ./run_ddp.sh 2 True --config configs/train_ddp.yaml
#
# Several machines: run the same line on each, with these variables set.
#   NNODES       number of machines (default 1)
#   NODE_RANK    0 on the first machine, 1 on the second, ...
#   MASTER_ADDR  name or address of the first machine
#   MASTER_PORT  a port that is free there (default 29500)
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 ./run_ddp.sh 8 True
#
# The exit status is torchrun's: 0 when all processes succeeded, 1 when one failed or the run was
# stopped by a signal. Wrong arguments of this file: one line and exit status 2.
set -euo pipefail

die() {
    printf 'run_ddp.sh: %s\n' "$1" >&2
    exit 2
}

usage() { sed -n '2,/^set /{s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}"; }

# "0,1,2" -> 3. Nothing, or -1, hides all devices.
count_list() {
    local items
    if [[ -z $1 || $1 == -1 ]]; then
        echo 0
    else
        IFS=, read -ra items <<<"$1"
        echo "${#items[@]}"
    fi
}

# Prints the number of GPUs that the processes will see; 0 means CPU.
count_gpus() {
    local lines
    if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
        count_list "$CUDA_VISIBLE_DEVICES"
    elif lines=$(nvidia-smi -L 2>/dev/null) && [[ $lines == *"GPU "* ]]; then
        grep -c '^GPU ' <<<"$lines"
    elif [[ -n ${ZE_AFFINITY_MASK:-} ]]; then
        count_list "$ZE_AFFINITY_MASK"
    else # other machines, AMD GPUs and unmasked Intel GPUs among them
        python -c 'import torch; print(torch.cuda.device_count() or torch.xpu.device_count())'
    fi
}

# nproc obeys OMP_NUM_THREADS, which says nothing about the number of cores.
count_cores() {
    env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc 2>/dev/null || getconf _NPROCESSORS_ONLN
}

wants_cpu() {
    local previous='' arg
    for arg in "$@"; do
        case $arg in
            --device=cpu | device=cpu) return 0 ;;
            cpu) [[ $previous == --device ]] && return 0 ;;
        esac
        previous=$arg
    done
    return 1
}

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
    usage
    exit 0
fi

# The two positional values may be left out: an option (--lr=1, lr=1) ends them.
ngpus=8
use_projection=True
if [[ $# -gt 0 && $1 != --* && $1 != *=* ]]; then
    ngpus=$1
    shift
    if [[ $# -gt 0 && $1 != --* && $1 != *=* ]]; then
        use_projection=$1
        shift
    fi
fi
[[ $ngpus =~ ^[1-9][0-9]{0,3}$ ]] || die "NGPUS must be a whole number from 1, not '$ngpus'"
case $use_projection in
    True | true | yes | 1 | False | false | no | 0) ;;
    *) die "USE_PROJECTION must be True or False, not '$use_projection'" ;;
esac

command -v torchrun >/dev/null || die "no torchrun on PATH; activate the environment that has torch"
if wants_cpu "$@"; then
    gpus=0
else
    gpus=$(count_gpus) || die "cannot count the GPUs: python on PATH has no working torch"
fi
if ((gpus > 0)); then
    ((ngpus <= gpus)) || die "NGPUS is $ngpus but $gpus GPU(s) are visible; try ./run_ddp.sh $gpus"
else
    cores=$(count_cores)
    ((ngpus <= cores)) ||
        die "NGPUS is $ngpus but there is no GPU and $cores CPU core(s); try ./run_ddp.sh $cores"
fi

nnodes=${NNODES:-1}
node_rank=${NODE_RANK:-0}
[[ $nnodes =~ ^[1-9][0-9]{0,4}$ ]] || die "NNODES must be a whole number from 1, not '$nnodes'"
if ! [[ $node_rank =~ ^(0|[1-9][0-9]{0,4})$ ]] || ((node_rank >= nnodes)); then
    die "NODE_RANK must be from 0 to NNODES - 1 = $((nnodes - 1)), not '$node_rank'"
fi
if ((nnodes == 1)); then
    where=(--standalone) # a free port: two runs on one machine do not collide
else
    [[ -n ${NODE_RANK:-} ]] || die "with NNODES=$nnodes set NODE_RANK too: 0 to $((nnodes - 1))"
    [[ -n ${MASTER_ADDR:-} ]] || die "with NNODES=$nnodes set MASTER_ADDR too: the first machine"
    where=(--nnodes="$nnodes" --node_rank="$node_rank"
        --master_addr="$MASTER_ADDR" --master_port="${MASTER_PORT:-29500}")
fi

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" >/dev/null && pwd -P)
# Without this, processes that torchrun restarts can hang: they find the addresses of the dead ones.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# torchrun would give every process one CPU thread.
threads=$(($(count_cores) / ngpus))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
# SIGUSR1 reaches the processes instead of killing torchrun; after any of these signals they have
# 120 s to write a checkpoint (a variable, since the torchrun of torch 2.10 has no option for it).
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=120
exec torchrun "${where[@]}" --nproc_per_node="$ngpus" \
    --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
    "$here/train_ddp.py" "--use_projection=$use_projection" "$@"
