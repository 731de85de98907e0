#!/usr/bin/env bash
# Starts train_ddp.py, one process per GPU of this machine; without a GPU, CPU processes.
#
# Usage: ./run_ddp.sh [NGPUS=8] [USE_PROJECTION=True] [options of train_ddp.py ...]
#   ./run_ddp.sh 8 True
#   ./run_ddp.sh 4 False --batch_size=128 --skip_phase1
#   CUDA_VISIBLE_DEVICES=2,3 ./run_ddp.sh 2 True --config configs/train_ddp.yaml
# Several machines: the same line on each, with NNODES, NODE_RANK (0 on the first), MASTER_ADDR (the
# first one's name) and, if it is not 29500, MASTER_PORT set.
set -euo pipefail

die() {
    printf 'run_ddp.sh: %s\n' "$1" >&2
    exit 2
}

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
    sed -n '2,/^set /{s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}"
    exit 0
fi
ngpus=8
projection=True
if [[ $# -gt 0 && $1 != --* && $1 != *=* ]]; then # an option (--lr=1, lr=1) ends the two values
    ngpus=$1
    shift
fi
if [[ $# -gt 0 && $1 != --* && $1 != *=* ]]; then
    projection=$1
    shift
fi
[[ $ngpus =~ ^[1-9][0-9]{0,3}$ ]] || die "NGPUS must be a whole number from 1, not '$ngpus'"

cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)
gpus=0
if ! [[ " $* " =~ device[\ =]cpu\  ]]; then
    gpus=$(python -c 'import torch; print(torch.accelerator.device_count())')
fi
most=$((gpus > 0 ? gpus : cores))
((ngpus <= most)) || die "NGPUS is $ngpus but here are $gpus GPU(s), $cores CPU core(s): give $most"

# One machine: on any free port, so that two runs do not collide; the host's name need not resolve.
where=(--standalone --local-addr=127.0.0.1)
if [[ ${NNODES:-1} != 1 ]]; then
    port=29500
    [[ -z ${SLURM_JOB_ID:-} ]] || port=$((10000 + SLURM_JOB_ID % 20000)) # each job has its own
    where=(--nnodes="$NNODES" --node_rank="${NODE_RANK:?with NNODES set it, too}"
        --master_addr="${MASTER_ADDR:?with NNODES set it, too}"
        --master_port="${MASTER_PORT:-$port}")
fi
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # or restarted processes look for the dead ones
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-120} # torchrun would say 30
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(((cores + ngpus - 1) / ngpus))} # torchrun would say 1
signals=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1
[[ -z $(trap -p HUP) ]] || signals=${signals/SIGHUP,/} # ignored, as nohup has it: the run goes on
# SIGUSR1 (a batch queue's warning) reaches the processes, which then have 120 s to save
exec torchrun "${where[@]}" --nproc_per_node="$ngpus" \
    --signals-to-handle="$signals" \
    "$(dirname -- "${BASH_SOURCE[0]}")/train_ddp.py" "--use_projection=$projection" "$@"
