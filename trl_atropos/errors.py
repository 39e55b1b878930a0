"""The errors that a user meets. `trl_atropos.train` prints one without a traceback, `trl-atropos
check` lists them as its findings. Anything else that is raised is a bug and keeps its traceback."""

ERROR = "error"
WARNING = "warning"


class AtroposTrainingError(RuntimeError):
    """Base of every error whose message is written for the person who started the run: what
    happened, the value that was seen, what to do about it in sentences, and a stable name for
    scripts, such as `port-taken`. The level is `"warning"` for a finding of `check` that does not
    end a run."""

    usual_code = "error"
    what_has_seen = False  # whether `what` always says the value in its own words

    def __init__(
        self, what: str, seen: str = "", fix: str = "", code: str = "", level: str = ERROR
    ) -> None:
        self.what = what
        self.seen = seen
        self.fix = fix
        self.code = code or self.usual_code
        self.level = level
        addition = f" (seen: {seen})" if not (self.what_has_seen or seen in what) else ""
        super().__init__(f"{what.rstrip('.')}{addition}. {fix}" if fix else what)


class RecipeError(AtroposTrainingError, ValueError):
    """The recipe or the command line is wrong. `what` names the setting and its value, `seen`
    repeats it as YAML."""

    usual_code = "setting"
    what_has_seen = True


class PushError(AtroposTrainingError):
    """The model could not be uploaded to the Hub."""


class CheckpointError(AtroposTrainingError):
    """A run cannot resume from the checkpoint."""


class RolloutError(AtroposTrainingError):
    """The Atropos API or the rollouts it delivered cannot be used."""


class ServiceError(AtroposTrainingError):
    """A service of the run could not be started, or died."""

    exit_code: int | None = None  # of a service that died


class ServerError(AtroposTrainingError):
    """The inference server refused, failed or did not answer in time."""


class ServerTimeout(ServerError):
    """The inference server gave no answer in time: it hangs, or it is overloaded."""


class AttachError(ServerError):
    """The trainer's parameters cannot be views of the server's memory."""


class ProbeError(AtroposTrainingError):
    """After a publish, the server did not sample from the weights that the trainer has, as `result`
    shows."""

    result = None  # the `ProbeResult`, where tokens were compared


class FingerprintError(AtroposTrainingError):
    """After a publish, a server's parameters were not the trainer's, bit for bit."""


class GatherError(AtroposTrainingError):
    """The trainer's weights cannot be put together for a server."""


class GradientError(AtroposTrainingError):
    """The gradient of an optimizer step is not finite, so that the step would destroy the
    weights."""


class EvaluationError(AtroposTrainingError):
    """An evaluation failed, or is wrongly set up."""


class SaveError(AtroposTrainingError):
    """A checkpoint could not be written to disk."""
