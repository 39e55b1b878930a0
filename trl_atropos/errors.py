"""The errors that a user meets, in four parts: what happened, what was seen, the way out, and a name for scripts.

`trl_atropos.train` prints one as a single message without a traceback, and `trl-atropos check` lists such objects as
its findings. Anything else that is raised is a bug and keeps its traceback.
"""

ERROR, WARNING = "error", "warning"


class AtroposTrainingError(RuntimeError):
    """
    Base of every error whose message is written for the person who started the run.

    Args:
        what (`str`): What happened.
        seen (`str`, *optional*): The value that was seen.
        fix (`str`, *optional*): What to do about it, in sentences.
        code (`str`, *optional*): Stable name for scripts, such as `port-taken`.
        level (`str`, *optional*, defaults to `"error"`): `"warning"` for a finding of `check` with which the run goes
            on, and loses something.
    """

    what_has_seen = False  # `what` says the value in its own words, so that the message needs no `seen`

    def __init__(self, what: str, seen: str = "", fix: str = "", code: str = "error", level: str = ERROR) -> None:
        self.what, self.seen, self.fix, self.code, self.level = what, seen, fix, code, level
        message = what
        if fix:
            has_seen = self.what_has_seen or seen in what
            message = what.rstrip(".") + (f" (seen: {seen})" if not has_seen else "") + f". {fix}"
        super().__init__(message)


class RecipeError(AtroposTrainingError, ValueError):
    """The recipe or the command line is wrong. `what` names the setting and its value, `seen` repeats it as YAML."""

    what_has_seen = True

    def __init__(self, what: str, seen: str = "", fix: str = "", code: str = "setting") -> None:
        super().__init__(what, seen, fix, code)


class PushError(AtroposTrainingError):
    """What is saved could not be uploaded to the Hub."""


class CheckpointError(AtroposTrainingError):
    """A checkpoint does not hold what is to be resumed from it."""


class OutputLockError(AtroposTrainingError):
    """Another run is using `output_dir`."""


class RolloutError(AtroposTrainingError):
    """The Atropos API or the rollouts it delivered cannot be used."""


class ServiceError(AtroposTrainingError):
    """A service of the run could not be started, or died."""


class ServerError(AtroposTrainingError):
    """The inference server refused, failed or did not answer in time."""


class ServerTimeout(ServerError):
    """The inference server gave no answer in time: it hangs, or it is overloaded."""


class AttachError(ServerError):
    """The trainer's parameters cannot be views of the server's memory."""


class ProbeError(AtroposTrainingError):
    """
    After a publish, the server did not sample from the weights that the trainer has.

    Attributes:
        result (`ProbeResult`, *optional*): By how much, where tokens were compared.
        seen (`str`): The same in words.
    """

    result = None


class GatherError(AtroposTrainingError):
    """The trainer's weights cannot be put together for a server."""


class SaveError(AtroposTrainingError):
    """A checkpoint did not reach the disk."""
