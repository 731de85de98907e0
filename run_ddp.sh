#!/usr/bin/env bash
# Starts train_ddp.py with NGPUS processes, one per GPU; without a GPU, CPU processes.
#
# Usage: ./run_ddp.sh [NGPUS=8] [USE_PROJECTION=True] [options of train_ddp.py ...]
#   ./run_ddp.sh 8 True --trust_remote_code    # the default teacher comes with code of its own
#   ./run_ddp.sh 4 False --batch_size=128 --skip_phase1 --trust_remote_code
#   CUDA_VISIBLE_DEVICES=2,3 ./run_ddp.sh 2 True --config configs/train_ddp_quickstart.yaml
# Several machines: the same line on each, with NNODES, NODE_RANK (0 on the first), MASTER_ADDR (the
# first one's name) and perhaps MASTER_PORT set (else 29500, in a SLURM job a port of its own).
set -euo pipefail

here=$(dirname -- "${BASH_SOURCE[0]}")
# shellcheck source=scripts/start_torchrun.sh
source "$here/scripts/start_torchrun.sh"

[[ ${1:-} != --help && ${1:-} != -h ]] || show_usage
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

count_devices "$@"
((ngpus <= most)) || die "NGPUS is $ngpus but here are $gpus GPU(s), $cores CPU core(s): give $most"

start_torchrun "$ngpus" "$here/train_ddp.py" "--use_projection=$projection" "$@"
