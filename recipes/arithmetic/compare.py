"""The same model and task with TRL's own `GRPOTrainer`, and one picture of both.

    python recipes/arithmetic/compare.py trl runs/arithmetic-trl
    python recipes/arithmetic/compare.py draw docs/arithmetic.svg --curve trl_atropos runs/arithmetic \
        --curve "TRL's GRPOTrainer" runs/arithmetic-trl

`trl` trains with the settings of `colocate.yaml`, or of another `--recipe`: model, problems,
reward, rollouts of a step, group size, learning rate, loss, temperature, length and steps. On a
GPU, vLLM in TRL's process samples; elsewhere, where that cannot run, Transformers does. `draw` asks
every checkpoint of the runs the same problems of the test split, which no run has trained on, and
keeps the answer in `curve.json`: for each checkpoint its step, rollouts, seconds since training
began, and pass@1. The seconds have no start-up and none of this evaluation. A curve may have
several folders, of several seeds, after each was measured with its own `--model`.
"""

import argparse
import json
from dataclasses import fields
from itertools import cycle, islice
from pathlib import Path

import yaml
from environment import ArithmeticConfig, ArithmeticEnv, problems, score
from make_model import mean, solve

RECIPE = Path(__file__).with_name("colocate.yaml")
# of the recipe that a command line may replace
SETTINGS = ("model_name_or_path", "max_steps", "seed")
ASKED = 500  # problems
AXES = ("rollouts", "seconds")  # of the picture
MARKS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)  # of its logit scale
COLORS = ("#d9730d", "#4a86c8", "#3f9b6b", "#a05cb4")  # are read on white and on black
GREY = "#808890"


def task_of(recipe: dict) -> ArithmeticConfig:
    """What the recipe's environment asks."""
    environment = recipe["environments"][0]
    return ArithmeticConfig(
        **(environment.get("config", {}) if isinstance(environment, dict) else {})
    )


def train_with_trl(folder: str, recipe: dict) -> None:
    import torch
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from trl_atropos.report.run_log import RunLog

    model = recipe["model_name_or_path"]
    task = task_of(recipe)
    cuda = torch.cuda.is_available()
    own = {"vllm_mode", "vllm_server_base_url", "output_dir", "report_to"}
    shared = {field.name for field in fields(GRPOConfig)} - own
    settings = {name: setting for name, setting in recipe.items() if name in shared}
    group_size = ArithmeticEnv.config_init()[0].group_size
    number = recipe["max_steps"] * recipe["per_device_train_batch_size"] // group_size
    # The same that the recipe's environment asks.
    asked = islice(problems("train", task.terms, task.digits, recipe["seed"]), number)
    if cuda:
        settings |= {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 512}
    args = GRPOConfig(
        **settings,
        output_dir=folder,
        num_generations=group_size,
        use_cpu=not cuda,
        bf16=cuda,
        report_to="none",
    )
    GRPOTrainer(
        model=model,
        reward_funcs=right_answers,
        args=args,
        train_dataset=Dataset.from_list([{"prompt": f"{problem}="} for problem in asked]),
        # as our own trainer has it, for the seconds
        callbacks=[RunLog(folder, {"model_name_or_path": model})],
    ).train()


def right_answers(prompts: list[str], completions: list[str], **_) -> list[float]:
    return [
        score(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)
    ]


def measure(folder: Path, first: Path, recipe: dict) -> list[dict[str, float]]:
    """Step, rollouts, seconds and pass@1 of `first`, the model that a run began with, and of every
    checkpoint."""
    import numpy
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    kept = folder / "curve.json"
    saved = {0: first} | {
        int(path.name.rpartition("-")[2]): path for path in folder.glob("checkpoint-*")
    }
    curve = json.loads(kept.read_text()) if kept.exists() else []
    if curve and saved.keys() <= {point["step"] for point in curve}:  # else the run has gone on
        return curve
    log = [json.loads(line) for line in (folder / "run_log.jsonl").read_text().splitlines()]
    begin = next(record for record in log if "begin" in record)
    at = {record["step"]: record["at"] for record in reversed(log) if "logs" in record} | {
        0: begin["at"]
    }
    rollouts = recipe["per_device_train_batch_size"]
    task = task_of(recipe)
    asked = list(islice(problems("test", task.terms, task.digits), ASKED))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    curve = []
    for step, path in sorted(saved.items()):
        model = AutoModelForCausalLM.from_pretrained(path)
        tokenizer = AutoTokenizer.from_pretrained(path)
        right = mean(solve(model.to(device), tokenizer, asked, task.max_new_tokens))
        # not every step is logged
        seconds = float(numpy.interp(step, sorted(at), sorted(at.values()))) - at[0]
        curve.append(
            {"step": step, "rollouts": step * rollouts, "seconds": seconds, "pass@1": right}
        )
        print(f"{folder}  step {step:4d}  {curve[-1]['seconds']:6.0f} s  pass@1 {right:.3f}")
    kept.write_text(json.dumps(curve, indent=1))
    return curve


def draw(picture: str, curves: dict[str, list[list[dict[str, float]]]], by: list[str]) -> None:
    """Held-out pass@1 by rollouts, by the clock, or both: a thin line for each run, and their mean
    at each checkpoint."""
    import numpy
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    colors = dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), GREY
    )
    with rc_context({"svg.fonttype": "none", "font.family": "sans-serif", **colors}):
        figure = Figure(figsize=(4 * len(by), 3.2), layout="constrained")
        for axes, x in zip(
            figure.subplots(1, len(by), sharey=True, squeeze=False)[0], by, strict=True
        ):
            for color, (title, runs) in zip(cycle(COLORS), curves.items()):
                lines = [
                    numpy.array([(point[x], point["pass@1"]) for point in run]).T for run in runs
                ]
                for line in lines:
                    # neither 0 nor 1 has a logit
                    line[1].clip(0.5 / ASKED, 1 - 0.5 / ASKED, out=line[1])
                    axes.plot(*line, color=color, linewidth=0.8, alpha=0.7)
                common = min(line.shape[1] for line in lines)  # checkpoints
                mean_line = numpy.mean([line[:, :common] for line in lines], axis=0)
                axes.plot(*mean_line, color=color, linewidth=2, label=title)
            axes.set_yscale("logit")
            low, high = axes.get_ylim()
            marks = [mark for mark in MARKS if low <= mark <= high]
            axes.set_yticks(marks, [f"{mark:g}" for mark in marks])
            axes.set(xlabel=x)
            axes.minorticks_off()
            axes.grid(color=GREY, alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
            axes.patch.set_visible(False)
        figure.axes[0].set_ylabel("pass@1 on problems never seen")
        figure.axes[0].legend(frameon=False, loc="lower right")
        figure.savefig(picture, transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    with_trl = commands.add_parser("trl", help="train with TRL's own trainer")
    with_trl.add_argument("folder")
    with_trl.add_argument(
        "--model_name_or_path", help="folder of the model (default: that of the recipe)"
    )
    with_trl.add_argument(
        "--max_steps", type=int, help="optimizer steps (default: those of the recipe)"
    )
    with_trl.add_argument("--seed", type=int, default=42)
    drawing = commands.add_parser("draw", help="measure the checkpoints of runs, and draw them")
    drawing.add_argument("picture")
    drawing.add_argument(
        "--curve",
        nargs="+",
        action="append",
        required=True,
        metavar=("TITLE", "FOLDER"),
        help="a title and its runs",
    )
    drawing.add_argument("--by", nargs="+", choices=AXES, default=AXES, help="default: both")
    begins = "folder of the model that the runs began with (default: that of the recipe)"
    drawing.add_argument("--model", dest="model_name_or_path", help=begins)
    for command in (with_trl, drawing):
        command.add_argument("--recipe", type=Path, default=RECIPE, help="default: colocate.yaml")
    options = vars(parser.parse_args())
    recipe = yaml.safe_load(options["recipe"].read_text())
    recipe |= {
        name: value for name, value in options.items() if name in SETTINGS and value is not None
    }
    if options["command"] == "trl":
        train_with_trl(options["folder"], recipe)
    else:
        model = Path(recipe["model_name_or_path"])
        curves = {
            title: [measure(Path(run), model, recipe) for run in runs]
            for title, *runs in options["curve"]
        }
        draw(options["picture"], curves, options["by"])
