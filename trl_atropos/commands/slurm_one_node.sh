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

@requeue@srun --cpu-bind=none @container@trl-atropos train @train@ $RESUME < /dev/null &
RUN=$!
@wait@