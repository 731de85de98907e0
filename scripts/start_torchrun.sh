# shellcheck shell=bash disable=SC2034
# What run_ddp.sh, run_train_uniref50_ddp.sh and run_dpo_ddp_local.sh share. They source this file.

die() {
    printf '%s: %s\n' "$(basename -- "$0")" "$1" >&2
    exit 2
}

# the comment at the top of the wrapper
show_usage() {
    sed -n '2,/^set /{s/^# \{0,1\}//p;}' "$0"
    exit 0
}

# Set cores, gpus (0 with --device cpu or --no_cuda on the command line), and most: how many processes
# may start here.
count_devices() {
    if [[ ${NNODES:-1} != 1 && (-z ${NODE_RANK:-} || -z ${MASTER_ADDR:-}) ]]; then
        die "with NNODES=$NNODES set NODE_RANK and MASTER_ADDR, too"
    fi
    cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)
    gpus=0
    if ! [[ " $* " =~ device[\ =]cpu\ |no_cuda(=[Tt]rue)?\  ]]; then
        gpus=$(python -c 'import torch; print(torch.accelerator.device_count())')
    fi
    most=$((gpus > 0 ? gpus : cores))
}

# start_torchrun PROCESSES SCRIPT [OPTIONS ...]: the wrapper becomes torchrun
start_torchrun() {
    local processes=$1
    shift
    # One machine: any free port, so that two runs do not collide; the host's name need not resolve.
    local where=(--standalone --local-addr=127.0.0.1)
    if [[ ${NNODES:-1} != 1 ]]; then
        local port=29500
        [[ -z ${SLURM_JOB_ID:-} ]] || port=$((10000 + SLURM_JOB_ID % 20000)) # each job has its own
        where=(--nnodes="$NNODES" --node_rank="$NODE_RANK"
            --master_addr="$MASTER_ADDR" --master_port="${MASTER_PORT:-$port}")
    fi
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # or restarted processes look for the dead ones
    # torchrun would say 30 seconds, and one thread
    export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-120}
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > processes ? cores / processes : 1))}
    # SIGUSR1 (a batch queue's warning) reaches the processes, which then have 120 s to save
    local signals=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1
    [[ -z $(trap -p HUP) ]] || signals=${signals/SIGHUP,/} # under nohup the run goes on
    exec torchrun "${where[@]}" --nproc_per_node="$processes" --signals-to-handle="$signals" "$@"
}
