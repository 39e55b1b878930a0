"""Decides what of a run's folder goes to the Hub, and explains it if the Hub takes nothing.

`AtroposGRPOTrainer` makes its repository within `repository_made`, and pushes within `model_only`.
`trl_atropos.train` calls `make_repository` before it starts anything.
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

# `ignore_patterns` of `HfApi.upload_folder`. Transformers already passes `checkpoint-*` and `_*`.
# These are not named `_*`: runs of earlier versions resume from them, TRL and TensorBoard choose
# the names of theirs, and Transformers uploads a checkpoint without any patterns.
KEPT_HERE = [
    "rollouts/*",
    "rollouts-before-*",
    "rollouts.jsonl",
    "completions/*",
    "logs/*",
    "environments/*",
    "evaluations/*",
    "eval/*",
    "adapters/*",
    "policies/*",
    "try/*",
    # TensorBoard's: they have every setting as it was, and are written to during an upload
    "runs/*",
    "run_log.jsonl",
    "report.html",
    "training_args.bin",  # the card has the settings
    "checkpoints-before-*",
    ".run.lock",
    ".run.json",
]


@contextmanager
def model_only() -> Iterator[None]:
    """Keeps `KEPT_HERE` out of what Transformers uploads within, and explains failures.

    Raises `PushError` if an upload fails at once, and logs it if it fails in the background. (A
    `.gitignore` in place of patterns would still send the Hub the names and the first bytes of
    these files.)
    """
    api = hf_api()
    upload = api.upload_folder

    def upload_model(**kwargs: Any) -> Any:
        patterns = kwargs.get("ignore_patterns") or []
        kwargs["ignore_patterns"] = [*patterns, *KEPT_HERE]
        try:
            started = upload(**kwargs)
        # of the Hub, of the network, of the token: what is saved is the same
        except Exception as error:
            folder = kwargs["folder_path"]
            repository = kwargs["repo_id"]
            raise PushError(
                f"The model is saved in {folder}, but its push to the Hub as {repository} failed "
                f"({_shortened(error)})",
                fix="Correct what it says, and push again with `trainer.push_to_hub()` or "
                "`hf upload`.",
            ) from error
        if isinstance(started, Future):
            started.add_done_callback(_warn_of_failure)
        return started

    api.upload_folder = upload_model
    try:
        yield
    finally:
        del api.upload_folder


def _warn_of_failure(push: Future) -> None:
    """Logs the error of an upload in the background, whose result nobody else reads."""
    if push.cancelled() or push.exception() is None:
        return
    logger.warning(
        "A push to the Hub failed (%s). What is saved is whole, and the next save pushes again.",
        _shortened(push.exception()),
    )


@contextmanager
def repository_made(args: Any) -> Iterator[str]:
    """Yields the name of the run's repository on the Hub, to be made within.

    `args` are `TrainingArguments`. Raises `PushError` if anything within fails.
    """
    name = args.hub_model_id or Path(args.output_dir).absolute().name
    try:
        yield name
    # of the Hub, of the network, of the token: what is saved is the same
    except Exception as error:
        raise PushError(
            f"The Hub did not take or confirm the repository {name} for `push_to_hub` "
            f"({_shortened(error)}). What {args.output_dir} holds is whole",
            fix="Correct what it says (the network, HF_HUB_OFFLINE, `hub_token`, `hub_model_id`), "
            "or train with `push_to_hub: false` and upload the model later with `hf upload`.",
        ) from error


def make_repository(args: Any) -> None:
    """Makes the repository as the trainer will, but before anything that takes long has begun."""
    with repository_made(args) as name:
        hf_api().create_repo(
            name, token=args.hub_token, private=args.hub_private_repo, exist_ok=True
        )


def _shortened(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
