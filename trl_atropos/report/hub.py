"""What of a run's folder goes to the Hub, and what a person hears when it does not arrive.

Transformers uploads all of `output_dir` except `checkpoint-*` and `_*`. Here that would be every rollout, the logs of
the services and, within `training_args.bin`, the Hub's token.
"""

import logging
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers.utils import hf_api

from trl_atropos.errors import PushError

logger = logging.getLogger(__name__)

# As `ignore_patterns` of `HfApi.upload_folder`. A model card says what `training_args.bin` does.
KEPT_HERE = (
    "rollouts/*",
    "rollouts-before-*",
    "rollouts.jsonl",
    "completions/*",
    "logs/*",
    "environments/*",
    "adapters/*",
    "policies/*",
    "runs/*",  # TensorBoard's, which hold every setting as it was, and are written to during an upload
    "run_log.jsonl",
    ".run.lock",
    "report.html",
    "training_args.bin",
)


@contextmanager
def model_only() -> Iterator[None]:
    """
    Within, what transformers uploads leaves out `KEPT_HERE`, and an upload in the background that fails is told of.

    A `.gitignore` would be heeded by the Hub only after it was sent the name and the first bytes of every file, and a
    batch of rollouts that is removed meanwhile would fail the upload.
    """
    api = hf_api()
    upload = api.upload_folder

    def upload_model(**kwargs: Any) -> Any:
        kwargs["ignore_patterns"] = [*(kwargs.get("ignore_patterns") or []), *KEPT_HERE]
        try:
            started = upload(**kwargs)
        except Exception as error:  # of the Hub, of the network, of the token: what is saved is the same
            raise PushError(
                f"The model is saved in {kwargs['folder_path']}, but its push to the Hub as {kwargs['repo_id']} "
                f"failed ({type(error).__name__}: {_short(error)}). Correct what it says, and push again with "
                "`trainer.push_to_hub()`, or the files of the model, the tokenizer and the card with `hf upload`."
            ) from error
        if isinstance(started, Future):
            started.add_done_callback(_warn_of_failure)
        return started

    api.upload_folder = upload_model
    try:
        yield
    finally:
        del api.upload_folder


@contextmanager
def repository_made(args: Any) -> Iterator[None]:
    """Within, a repository is made or found on the Hub. `args` are the run's `TrainingArguments`."""
    try:
        yield
    except Exception as error:  # of the Hub, of the network, of the token: what is saved is the same
        repository = args.hub_model_id or Path(args.output_dir).absolute().name
        raise PushError(
            f"The Hub did not take or confirm the repository {repository} for `push_to_hub` ({type(error).__name__}: "
            f"{_short(error)}). What {args.output_dir} holds is whole. Correct what it says (the network, "
            "HF_HUB_OFFLINE, `hub_token`, `hub_model_id`), or train with `push_to_hub: false` and upload the model "
            "from where there is a network, with `hf upload`."
        ) from error


def make_repository(args: Any) -> None:
    """As the trainer does when it is made. Raises `PushError` before anything that takes long has begun."""
    with repository_made(args):
        name = args.hub_model_id or Path(args.output_dir).absolute().name
        hf_api().create_repo(name, token=args.hub_token, private=args.hub_private_repo, exist_ok=True)


def _warn_of_failure(push: Future) -> None:
    """Of an upload in the background nobody else asks how it ended."""
    if not push.cancelled() and (error := push.exception()) is not None:
        logger.warning(
            "A push to the Hub failed (%s: %s). What is saved in `output_dir` is whole; the next save pushes again, "
            "and so does `trainer.push_to_hub()`.",
            type(error).__name__,
            _short(error),
        )


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
