#!/bin/bash
#SBATCH --job-name=@name@
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=@gpus@
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append

# Made by: @made_by@
# Add the lines that your cluster wants, such as --account, --partition, --cpus-per-task and --mem. Then, in the folder
# where the recipe's paths begin: sbatch FILE. `trl-atropos check` says before whether the recipe is right.

set -euo pipefail
export PATH=@bin@:$PATH  # where this script was made

OUTPUT=@output_dir@
mkdir -p "$OUTPUT"

# Five minutes before the time limit, the job is requeued. It goes on from its last checkpoint: `save_steps` says how
# much is lost.
requeue() {
    echo "The time limit is near: job $SLURM_JOB_ID is requeued"
    scontrol requeue "$SLURM_JOB_ID"
}
trap requeue USR1
RESUME=
if ((${SLURM_RESTART_COUNT:-0})) && compgen -G "$OUTPUT/checkpoint-*/trainer_state.json" > /dev/null; then
    RESUME="--resume_from_checkpoint true"
fi
srun --cpu-bind=none @container@trl-atropos train @train@ $RESUME < /dev/null &
RUN=$!
# A signal ends `wait`, not the run.
CODE=0
while wait "$RUN" || CODE=$?; kill -0 "$RUN" 2> /dev/null; do CODE=0; done
exit "$CODE"
