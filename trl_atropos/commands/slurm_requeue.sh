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
