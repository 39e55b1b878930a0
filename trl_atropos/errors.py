"""The errors that you may meet. `trl_atropos.train` prints one without a traceback, and
`trl-atropos check` lists them as its findings. Any other exception is a bug and keeps its
traceback."""

import textwrap
from collections.abc import Sequence

LONGEST_REASON = 250  # characters
ERROR = "error"
WARNING = "warning"


class AtroposTrainingError(RuntimeError):
    """
    Base of every error whose message is written for the person who started the run.

    Attributes:
        what: What happened, without a full stop.
        seen: The value that was seen, such as `max_steps: -1`.
        fix: What to do about it, in sentences.
        code: A stable name for scripts, such as `port-taken`.
        level: `"error"`, or `"warning"` for a finding of `check` that does not end a run.
        further: Other mistakes in the same place, which `check` lists behind this one.
    """

    usual_code = "error"
    what_has_seen = False  # whether `what` always states the value in its own words

    def __init__(
        self, what: str, seen: str = "", fix: str = "", code: str = "", level: str = ERROR
    ) -> None:
        self.what = what
        self.seen = seen
        self.fix = fix
        self.code = code or self.usual_code
        self.level = level
        self.further: Sequence[AtroposTrainingError] = ()
        message = what
        if fix:
            message = what.rstrip(".")
            if not self.what_has_seen and seen not in what:
                message += f" (seen: {seen})"
            message += f". {fix}"
        super().__init__(message)


class RecipeError(AtroposTrainingError, ValueError):
    """The recipe or the command line is wrong. `what` names the setting and its value, and `seen`
    repeats them as YAML."""

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


class OtherWeightsError(AttachError):
    """The server has other weights than the trainer."""


class ProbeError(AtroposTrainingError):
    """After a publish, the server did not sample from the trainer's weights, as `result` shows."""

    result = None  # the `ProbeResult`, if tokens were compared


class FingerprintError(AtroposTrainingError):
    """After a publish, a server's parameters were not the trainer's, bit for bit."""


class GatherError(AtroposTrainingError):
    """The trainer's weights cannot be put together for a server."""


class GradientError(AtroposTrainingError):
    """The gradient of an optimizer step is not finite. The step would destroy the weights."""


class EvaluationError(AtroposTrainingError):
    """An evaluation failed, or is wrongly set up."""


class SaveError(AtroposTrainingError):
    """A checkpoint could not be written to disk."""


def reason_of(error: object) -> str:
    """Returns the text of a library's error as one line without a full stop: its first two
    sentences. The first alone often only names a file, as in "Unrecognized model in FOLDER."."""
    sentences = " ".join(str(error).split()).split(". ")
    text = ". ".join(sentences[:2])
    return textwrap.shorten(text, LONGEST_REASON, placeholder=" ...").rstrip(".")
