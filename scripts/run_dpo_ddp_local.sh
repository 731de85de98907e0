#!/usr/bin/env bash
# Starts run_dpo_ddp.py, one process per GPU of this machine, with the output on the terminal and in
# logs/dpo_ddp_DATE_TIME.out (standard output) and .err (standard error).
#
# Usage: ./scripts/run_dpo_ddp_local.sh [NGPUS] [options of run_dpo_ddp.py ...]
#
#   NGPUS   processes to start on this machine: at most the visible GPUs; without a GPU, or with
#           --device cpu or --no_cuda, at most the CPU cores (default: all GPUs, 2 without a GPU)
#
# Examples:
#   ./scripts/run_dpo_ddp_local.sh 2 --config configs/run_dpo_ddp_quickstart.yaml
#   ./scripts/run_dpo_ddp_local.sh 4 --train_data pairs.json --output_dir outputs/dpo_ddp
#   ./scripts/run_dpo_ddp_local.sh 12 --config configs/run_dpo_ddp.yaml --backend ccl
#
# Several machines: run the same line on each, with these variables set.
#   NNODES       number of machines (default 1)
#   NODE_RANK    0 on the first machine, 1 on the second, ...
#   MASTER_ADDR  name or address of the first machine
#   MASTER_PORT  a port that is free there (default 29500)
# LOG_DIR names another folder for the logs.
#
# The exit status is torchrun's: 0 when all processes succeeded, 1 when one failed or the run was
# stopped by a signal. Wrong arguments of this file: one line and exit status 2.
set -euo pipefail

die() {
    printf 'run_dpo_ddp_local.sh: %s\n' "$1" >&2
    exit 2
}

usage() { sed -n '2,/^set /{s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}"; }

# nproc obeys OMP_NUM_THREADS, which says nothing about the number of cores.
count_cores() {
    env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc 2>/dev/null || getconf _NPROCESSORS_ONLN
}

wants_cpu() {
    local previous='' arg
    for arg in "$@"; do
        case $arg in
            --device=cpu | device=cpu | --no_cuda | --no_cuda=True | no_cuda=True) return 0 ;;
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
ngpus=''
if [[ $# -gt 0 && $1 != --* && $1 != *=* ]]; then # an option (--lr=1, lr=1) ends what is positional
    ngpus=$1
    shift
fi
[[ -z $ngpus || $ngpus =~ ^[1-9][0-9]{0,3}$ ]] || die "NGPUS must be a whole number from 1, not '$ngpus'"

command -v python >/dev/null || die "no python on PATH; activate the environment that has torch"
command -v torchrun >/dev/null || die "no torchrun on PATH; activate the environment that has torch"
gpus=0
if ! wants_cpu "$@"; then
    gpus=$(python -c 'import torch; print(torch.cuda.device_count() or torch.xpu.device_count())' 2>/dev/null) ||
        die "python on PATH cannot import torch; activate the environment that has it, or pip install -r requirements.txt"
fi
if ((gpus > 0)); then
    ngpus=${ngpus:-$gpus}
    ((ngpus <= gpus)) || die "NGPUS is $ngpus but $gpus GPU(s) are visible; try $gpus"
else
    cores=$(count_cores)
    ngpus=${ngpus:-$((cores < 2 ? cores : 2))}
    ((ngpus <= cores)) || die "NGPUS is $ngpus but there is no GPU and $cores CPU core(s); try $cores"
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

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." >/dev/null && pwd -P)
logs=${LOG_DIR:-logs}
stamp=$(date +%Y%m%d_%H%M%S)
((nnodes == 1)) || stamp+=.node$node_rank
log=$logs/dpo_ddp_$stamp
[[ ! -e $log.out ]] || log+=.$$ # twice in a second
{ mkdir -p "$logs" && : >"$log.out" && : >"$log.err"; } 2>/dev/null || die "cannot write $log.out; set LOG_DIR"

# Without this, processes that torchrun restarts can hang: they find the addresses of the dead ones.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# torchrun would give every process one CPU thread.
threads=$(($(count_cores) / ngpus))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
# SIGUSR1 reaches the processes instead of killing torchrun; after any of these signals they have
# 120 s to write a checkpoint (a variable, since the torchrun of torch 2.10 has no option for it).
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=120
printf 'run_dpo_ddp_local.sh: %s processes, logs %s.out and .err\n' "$ngpus" "$log"
# exec: this process becomes torchrun, which gets its signals and gives its exit status. tee outlives
# the signals, and a terminal that is gone, until the last process has closed its output.
exec torchrun "${where[@]}" --nproc_per_node="$ngpus" \
    --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
    "$here/run_dpo_ddp.py" "$@" \
    > >(trap '' TERM INT HUP QUIT USR1 PIPE && exec tee -a "$log.out") \
    2> >(trap '' TERM INT HUP QUIT USR1 PIPE && exec tee -a "$log.err" >&2)
