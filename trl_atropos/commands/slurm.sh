#!/bin/bash
#SBATCH --job-name=@name@
#SBATCH --nodes=@nodes@
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=@gpus@
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append

# Made by: @made_by@
# Nodes that train: @trainers@. Nodes that serve: @serving@, each with @servers@ server(s) of @each@ GPU(s).
# Add the lines that your cluster wants, such as --account and --partition. Then, in a folder that all nodes share and
# where the recipe's paths begin: sbatch FILE. `trl-atropos check` says before whether the recipe is right.

set -euo pipefail
export PATH=@bin@:$PATH  # where this script was made

TRAINERS=@trainers@ SERVERS_PER_NODE=@servers@ GPUS_PER_SERVER=@each@
OUTPUT=@output_dir@
mkdir -p "$OUTPUT"
mapfile -t NODES < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

# Runs a command on so many nodes, which a list names, beside what else runs there.
on() { srun --overlap --cpu-bind=none --nodes="$1" --ntasks="$1" --nodelist="$2" @container@"${@:3}"; }

# A node's first address. If it has several networks, choose the one that the nodes reach each other by.
address() { on 1 "$1" hostname -I | awk '{ print $1 }'; }

# One token for servers and trainer, in a file that only you can read. It goes with the job.
TOKEN_FILE=$(realpath "$OUTPUT")/token-$SLURM_JOB_ID
export TOKEN_FILE
(umask 077 && od -An -N24 -tx1 /dev/urandom | tr -d ' \n' > "$TOKEN_FILE")
STEPS=()
trap 'rm -f "$TOKEN_FILE"; kill "${STEPS[@]}" 2> /dev/null || true' EXIT

# ------------------------------------------------------------------------------------------------------------- servers

URLS=()
for node in "${NODES[@]:TRAINERS}"; do
    HOST=$(address "$node")
    for ((i = 0; i < SERVERS_PER_NODE; i++)); do
        PORT=$((9001 + i))
        DEVICES=$(seq -s, $((i * GPUS_PER_SERVER)) $(((i + 1) * GPUS_PER_SERVER - 1)))
        export HOST PORT DEVICES
        on 1 "$node" bash -s > "$OUTPUT/server-$node-$i.log" 2>&1 <<'SERVER' &
TRL_ATROPOS_TOKEN=$(< "$TOKEN_FILE")
export TRL_ATROPOS_TOKEN CUDA_VISIBLE_DEVICES=$DEVICES
exec @serve@ \
    --host "$HOST" --port "$PORT" < /dev/null
SERVER
        STEPS+=($!)
        URLS+=("http://$HOST:$PORT")
    done
done

SAY_AT=10  # seconds
for url in "${URLS[@]}"; do
    until curl --silent --fail --noproxy '*' --output /dev/null "$url/health"; do
        for step in "${STEPS[@]}"; do
            kill -0 "$step" 2> /dev/null || { echo "A server has ended: see $OUTPUT/server-*.log" >&2; exit 1; }
        done
        ((SECONDS < @patience@)) || { echo "No server at $url: see $OUTPUT/server-*.log" >&2; exit 1; }
        if ((SECONDS >= SAY_AT)); then
            echo "Waiting for the server at $url, $SECONDS s: see $OUTPUT/server-*.log"
            SAY_AT=$((SECONDS * 2))
        fi
        sleep 5
    done
    echo "A server is ready at $url after $SECONDS s"
done

# ------------------------------------------------------------------------------------------------------------- trainer

HEAD=$(address "${NODES[0]}")
SERVERS=$(IFS=, && echo "${URLS[*]}")
no_proxy=${no_proxy:+$no_proxy,}127.0.0.1,$(sed 's#http://##g; s#:[0-9]*##g' <<< "$SERVERS")

@requeue@export HEAD SERVERS RESUME no_proxy
on "$TRAINERS" "$(IFS=, && echo "${NODES[*]:0:TRAINERS}")" bash -s <<'TRAINER' &
TRL_ATROPOS_TOKEN=$(< "$TOKEN_FILE")
export TRL_ATROPOS_TOKEN
exec accelerate launch --quiet @launch@ \
    -m trl_atropos.train @train@ \
    --start_vllm false --vllm_server_base_url "$SERVERS" $RESUME < /dev/null
TRAINER
RUN=$!
STEPS+=("$RUN")
@wait@