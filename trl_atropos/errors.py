"""The errors a user meets. Each message says what happened, the value that was seen, and the way out.

`trl_atropos.train` prints these without a traceback; anything else that reaches it is a bug and keeps its traceback.
"""


class AtroposTrainingError(RuntimeError):
    """Base of every error whose message is written for the person who started the run."""


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
    seen = ""


class GatherError(AtroposTrainingError):
    """The trainer's weights cannot be put together for a server."""


class SaveError(AtroposTrainingError):
    """A checkpoint did not reach the disk."""
