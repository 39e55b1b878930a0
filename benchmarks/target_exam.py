"""What both sides of `trl-atropos bench target` share: their settings, the model that all runs begin
with, and the exam that the policy sits.

An `Exam` among the trainer's callbacks samples the answers to the held-out problems, with the clock
of the run stopped, and ends the training when enough of them are right.
"""

import contextlib
import json
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from typing import Any

# A recipe's folder is no package.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes/arithmetic"))

import torch
import yaml
from environment import ArithmeticConfig, problems
from make_model import SIZES, make_model, make_tokenizer, mean, new_model, solve
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

ROOT = Path(__file__).resolve().parents[1]
EXAM_SEED = 0  # of the answers that are sampled; the state of training's generators stays


class Settings:
    """What `settings.json` says, for a side whose files stand in `folder`."""

    def __init__(self, folder: Path):
        written = json.loads((folder / "settings.json").read_text())
        self.folder = folder
        self.model = Path(written["model"])
        self.started_at: float = written["started_at"]  # this process, in seconds since 1970
        self.protocol: dict[str, Any] = written["protocol"]
        self.recipe: dict[str, Any] = yaml.safe_load((ROOT / self.protocol["recipe"]).read_text())
        environment = self.recipe["environments"][0]
        self.task: dict[str, Any] = {}  # settings of the environment, in the recipe
        if isinstance(environment, dict):
            self.task = environment["config"]

    @property
    def budget(self) -> int:
        return self.protocol["training"]["max_steps"]

    def is_due(self, step: int) -> bool:
        """Returns whether the policy is evaluated after this optimizer step."""
        since_first = step - self.protocol["first_evaluation"]
        return since_first >= 0 and since_first % self.protocol["evaluate_every"] == 0


def pretrain(settings: Settings) -> None:
    """Makes the model that all runs begin with. In a rehearsal, it has learned nothing."""
    size = SIZES[settings.protocol["size"]]
    draft = settings.model.with_name("model.draft")
    if settings.protocol["is_rehearsal"]:
        tokenizer = make_tokenizer()
        new_model(size, tokenizer).save_pretrained(draft)
        tokenizer.save_pretrained(draft)
    else:
        # In bfloat16 it takes half of the recipe's time. Autocast would keep the weights that it
        # has cast until it ends, and the optimizer's steps would change nothing.
        device = "cuda" if torch.cuda.is_available() else "cpu"
        with torch.autocast(device, torch.bfloat16, cache_enabled=False):
            make_model(str(draft), settings.protocol["model_seed"], size)
    draft.rename(settings.model)


def do_nothing() -> None:
    """Stands in for what one side has and the other has not."""


class Exam(TrainerCallback):
    """
    Looks for the target after the steps of the protocol, and ends the training there.

    `begin` makes it ready for a run. Times are in seconds since 1970; `evaluation_s` are those
    for which the clock stood still.
    """

    def __init__(self, settings: Settings):
        self._settings = settings
        task = ArithmeticConfig(**settings.task)
        protocol = settings.protocol
        asked = problems("test", task.terms, task.digits)
        self._problems = list(islice(asked, protocol["problems"]))
        self._max_new_tokens = protocol["training"]["max_completion_length"]
        self._tokenizer = AutoTokenizer.from_pretrained(settings.model)
        self._model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32)
        self._model.eval()
        self._devices: list[torch.device] = []  # that have random generators of their own
        if torch.cuda.is_available():
            self._model.cuda()
            self._devices.append(self._model.device)
        self.before = self._share_solved()  # by the model that the runs begin with

    def begin(
        self,
        settle: Callable[[], None],
        sampling_stopped: Callable[[], AbstractContextManager],
    ) -> None:
        """`settle` returns when nothing of the last step goes on any more, which counts.
        `sampling_stopped` keeps everything else from working while the clock stands still."""
        self._settle = settle
        self._sampling_stopped = sampling_stopped
        self.evaluation_s = 0.0
        self.curve: list[dict[str, float]] = []
        self.began_at = None
        self.reached = False

    def on_train_begin(self, args, state, control, **kwargs):
        self.began_at = time.time()

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if not self._settings.is_due(state.global_step):
            return
        self._settle()
        for device in self._devices:
            torch.cuda.synchronize(device)
        stopped_at = time.time()
        with self._sampling_stopped():
            self._model.load_state_dict(model.state_dict())
            share = self._share_solved()
        point = {
            "step": state.global_step,
            "at": stopped_at - self.evaluation_s,
            "pass@1": share,
        }
        self.curve.append(point)
        self.reached = share >= self._settings.protocol["target"]
        control.should_training_stop = self.reached or control.should_training_stop
        self.evaluation_s += time.time() - stopped_at

    def _share_solved(self) -> float:
        with torch.random.fork_rng(self._devices):
            torch.manual_seed(EXAM_SEED)
            scores = solve(self._model, self._tokenizer, self._problems, self._max_new_tokens)
        return mean(scores)

    def row(self, first_request: float) -> dict[str, Any]:
        """Returns the result of the run, whose clock began at `first_request`. Lets go of the run's
        trainer."""
        self._settle = do_nothing
        self._sampling_stopped = contextlib.nullcontext
        curve = []
        for point in self.curve:
            seconds = point["at"] - first_request
            curve.append([point["step"], round(seconds, 3), point["pass@1"]])
        steps, seconds, share = curve[-1]
        return {
            "reached": self.reached,
            "seconds": seconds,
            "steps": steps,
            "pass@1": share,
            "pass@1_before": self.before,
            "evaluation_s": self.evaluation_s,
            "curve": curve,
        }
