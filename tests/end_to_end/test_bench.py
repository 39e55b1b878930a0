"""`trl-atropos bench`, through the real command and with real servers."""

import argparse
import json
import os
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import attention, delivery, sampling
from benchmarks.models import make_model
from benchmarks.packed_loop import PackedLoop, Row
from benchmarks.processes import launched, run_variables
from benchmarks.sampling_targets import Engine
from benchmarks.step_trainers import make_rows
from benchmarks.weights import _rows_of, build_parser, table
from tests.forge import FORKED_ENGINES, TRAINER
from trl_atropos.server.processes import FAST_LOGPROBS_VARIABLE
from trl_atropos.weights.tolerance import Tolerance

COMMAND = ["-m", "trl_atropos.cli", "bench"]
PATIENCE = 900.0  # seconds for one run on a machine that is busy with other things
PHASES = ("pause_ms", "publish_ms", "resume_ms")

pytestmark = pytest.mark.timeout(PATIENCE + 60)


def bench(*arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess:
    environment = os.environ | FORKED_ENGINES | ({} if folder is None else {"TMPDIR": str(folder)})
    return TRAINER.run([*COMMAND, *arguments], environment, timeout=PATIENCE)


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> tuple[dict, Path, Path]:
    """The result as printed, the file that it was written to, and the folder that the models were
    made in."""
    folder = tmp_path_factory.mktemp("bench")
    output = tmp_path_factory.mktemp("output") / "result.json"
    grid = ["--modes", "colocate,nccl_lora", "--params", "1M", "--ranks", "8", "--repeats", "3"]
    done = bench("weights", *grid, "--json", "--output", str(output), folder=folder)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout), output, folder


@pytest.mark.slow
@pytest.mark.server
def test_configuration_has_row_with_all_numbers(measured):
    rows = measured[0]["rows"]
    assert [(row["mode"], row["rank"]) for row in rows] == [("colocate", None), ("nccl_lora", 8)]
    for row in rows:
        assert abs(row["params"] - 1e6) < 1e5
        assert all(row[name] >= 0 for name in PHASES)
        assert row["total_ms"] == row["pause_ms"] + row["publish_ms"] + row["resume_ms"]
        assert row["first_publish_ms"] > 0


@pytest.mark.slow
@pytest.mark.server
def test_colocate_moves_nothing_and_adapter_has_ratio(measured):
    colocate, adapter = measured[0]["rows"]
    assert (colocate["bytes"], colocate["floor_ms"], colocate["ratio"], colocate["transport"]) == (
        0,
        0,
        None,
        None,
    )
    assert adapter["bytes"] > 0 and adapter["bytes"] % (4 * 8) == 0  # float32, and the rank
    assert adapter["ratio"] == adapter["publish_ms"] / adapter["floor_ms"]
    assert adapter["transport"] in ("gloo", "memory")
    assert measured[0]["header"]["link_gb_per_s"][adapter["transport"]] > 0


@pytest.mark.slow
@pytest.mark.server
def test_server_samples_from_published_weights(measured):
    for row in measured[0]["rows"]:
        allowed = Tolerance.of(row["device"]).max_abs
        assert 0 < row["probe_max_abs_diff"] <= allowed  # 0 would be no comparison


@pytest.mark.slow
@pytest.mark.server
def test_weights_file_has_output_and_models_are_gone(measured):
    result, output, folder = measured
    assert json.loads(output.read_text()) == result
    assert not list(folder.glob("trl_atropos_bench_*"))


def test_failing_configuration_has_row_per_rank(tmp_path):
    options = build_parser().parse_args(["--modes", "nccl_lora", "--ranks", "8,16"])
    rows = list(
        _rows_of(
            "nccl_lora", tmp_path / "no model", "float32", tmp_path / "logs", {}, None, options
        )
    )
    assert [row["rank"] for row in rows] == [8, 16]
    for row in rows:
        assert (
            row["error"].startswith("ServiceError: vllm ended with exit code")
            and "publish_ms" not in row
        )
    named = [{"mode": "nccl_lora", "model": "0.5M", **row} for row in rows]
    assert f"nccl_lora at 0.5M failed: {rows[0]['error']}" in table(
        {"header": {"link_gb_per_s": {}}, "rows": named}
    )


@pytest.mark.slow(20)
def test_trainers_of_step_benchmark_take_same_step():
    trainers = ["trl", "tokens", "packed_loop"]
    size = ["--params", "0.5M", "--rows", "8", "--micro_batch", "4", "--median", "16"]
    size += ["--prompt", "8", "--longest", "64", "--shapes", "spread", "--rounds", "1"]
    done = bench("step", "--trainers", ",".join(trainers), *size, "--json")
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout)
    rows = result["rows"]
    assert [row["trainer"] for row in rows] == trainers
    of_trl, ours, loop = rows
    assert ours["loss"] == pytest.approx(of_trl["loss"], abs=1e-6)
    assert loop["of_loop"] == 1
    assert ours["of_loop"] == ours["tokens_per_s"] / loop["tokens_per_s"]
    expected = "compiled" if torch.cuda.is_available() else "not_compiled"
    assert result["header"]["packed_loop"] == expected
    assert all(row["tokens_per_s"] > 0 for row in rows)


@pytest.mark.slow
def test_delivery_is_measured_from_answers_to_rows():
    options = argparse.Namespace(sequences=16, tokens=100, group_size=4, rounds=2)
    result = delivery.run(options)
    assert [row["answer"] for row in result["rows"]] == [*delivery.ANSWERS]
    for row, line in zip(result["rows"], delivery.table(result).splitlines()[3:], strict=True):
        assert row["answer"] in line
        assert row["us_a_token"] == row["seconds"] / 1600 * 1e6
        assert 0 < row["seconds"] < 60 and row["environment_us"] >= 0


def test_attention_benchmark_names_kernels_that_are_not_there():
    options = argparse.Namespace(
        params="0.6B", tokens=[64, 128], kernels=[*attention.KERNELS], rounds=1
    )
    result = attention.run(options)
    number = len(attention.KERNELS)
    assert [row["tokens"] for row in result["rows"]] == [64] * number + [128] * number
    lines = attention.table(result).splitlines()[3:]
    for row, line in zip(result["rows"], lines, strict=True):
        assert row["kernel"] in line
        on_cpu = row["kernel"] in ("torch", "cudnn")  # cudnn's way, by another backend of torch's
        assert ("why_not" in row) == (not on_cpu and not torch.cuda.is_available())
    fastest = [row for row in result["rows"] if row.get("of_best") == 1]
    assert len(fastest) == 2
    assert result["rows"][0]["error"] == 0


@pytest.mark.full
@pytest.mark.slow(100)
@pytest.mark.server
def test_runs_on_long_rollouts_are_measured_whole_and_divided(tmp_path_factory):
    folder = tmp_path_factory.mktemp("long")
    done = bench("long", "--tokens", "64", "--steps", "3", "--json", folder=folder)
    assert done.returncode == 0, done.stderr[-4000:]
    one, two = json.loads(done.stdout)["rows"]
    assert (one["processes"], one["tokens"]) == (1, 64)
    assert (two["processes"], two["tokens"]) == (2, 128)
    assert one["of_first"] == 1
    assert two["of_first"] == two["flops_per_process_s"] / one["flops_per_process_s"]
    for row in (one, two):
        assert row["tokens_per_s"] == pytest.approx(2 * row["tokens"] / row["step_s"])
        assert row["grad_norm"] > 0
        assert 0 < row["probe"] < 1e-4
        assert row["computing_s"] + row["publish_ms"] / 1e3 < row["step_s"]
    assert not list(folder.glob("trl_atropos_bench_*"))


@pytest.mark.full
@pytest.mark.slow(100)
@pytest.mark.server
@pytest.mark.parametrize("sides", ["strict,no_logprobs", "trl,strict"])
def test_whole_loop_is_measured_beside_that_of_trl(sides, tmp_path_factory):
    """Our side with a real server, API and environment; TRL's samples by Transformers, for want of
    a GPU."""
    folder = tmp_path_factory.mktemp("loop")
    size = ["--params", "0.5M", "--sequences", "16", "--tokens", "8", "--steps", "2"]
    size += ["--micro_batch", "8"]
    done = bench("loop", "--against", "trl", "--sides", sides, *size, "--json", folder=folder)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = {row["side"]: row for row in json.loads(done.stdout)["rows"]}
    assert list(rows) == sides.split(",")
    strict = rows["strict"]
    assert strict["staleness"] == 0
    if "trl" in rows:
        assert strict["speedup"] == strict["sampled_per_s"] / rows["trl"]["sampled_per_s"]
    if "no_logprobs" in rows:
        without = rows["no_logprobs"]["sampled_per_s"]
        assert strict["of_no_logprobs"] == strict["sampled_per_s"] / without
    for row in rows.values():
        # the prompts
        assert row["trained_per_s"] - row["sampled_per_s"] == pytest.approx(4 * 16 / row["step_s"])
    assert 0 < strict["publish_ms"] < 1e3 * strict["step_s"]
    assert not list(folder.glob("trl_atropos_bench_*"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["weights", "--modes", "colocate,serve"], "'serve' is none of colocate, "),
        (["step", "--shapes", "spread, even"], "--shapes: 'even' is none of spread, equal"),
        (["episodes", "--cases", "agents"], "'agents' is none of agent, prompt"),
        (["attention", "--kernels", "FA5"], "'FA5' is none of torch, "),
        (["numerics", "--numerics", "exact"], "'exact' is none of "),
        (["numerics", "--params", "20X"], "'20X' is no model size: write it like 20M"),
        (["sampling", "--params", "big"], "'big' is no model size: write it like 20M"),
        (["long", "--processes", "3"], "--processes 3 does not divide the model's"),
        (["long", "--tokens", "16"], "--tokens 16 leaves no completion after 16 of the prompt"),
        (["long", "--rollouts", "3"], "two of them are a group, so it must be even"),
        (["weights", "--params", "20X"], "'20X' is no model size: write it like 20M"),
        (["weights", "--params", "10K"], "'10K' is too small: ask for 0.5M parameters or more"),
        (["weights", "--ranks", "8,0"], "'0' is no number of 1 or more"),
        (["weights", "--ranks", "1024"], "1024: vLLM serves adapters of ranks up to 512"),
        (["weights", "--repeats", "many"], "'many' is no number of 1 or more"),
        (
            ["weights", "--output", "no/such/folder/x.json"],
            "no/such/folder/x.json does not exist: make it first",
        ),
        (["weights", "--sizes", "1M"], "unrecognized arguments: --sizes 1M"),
        (
            ["ingest", "--tokens", "1"],
            "--tokens is 1: a sequence has a prompt and a completion, so ask for 2 or more",
        ),
        (["ingest", "--sequences", "9"], "--sequences 9 is not a multiple of --group_size 8"),
        (["ingest", "--rounds", "0"], "'0' is no number of 1 or more"),
        (["delivery", "--sequences", "9"], "--sequences 9 is not a multiple of --group_size 8"),
        (["wheels"], "unknown benchmark 'wheels'. There are: weights, ingest"),
    ],
)
def test_wrong_flag_is_one_line_with_fix(arguments, message):
    done = bench(*arguments)
    assert done.returncode != 0 and done.stdout == ""
    assert message in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--help"], ["weights", "ingest"]),
        (
            ["weights", "--help"],
            ["publish", "floor", "ratio", "colocate_lora", "--gpu_memory_utilization", "0.6B"],
        ),
        (["ingest", "--help"], ["orjson", "socket", "tensors", "ratio", "memory", "--sequences"]),
    ],
)
def test_benchmark_help_explains_numbers(arguments, words):
    done = bench(*arguments)
    assert done.returncode == 0
    for word in words:
        assert word in done.stdout


@pytest.fixture(scope="module")
def ingested(tmp_path_factory) -> tuple[dict, Path, Path]:
    """The result as printed, the file that it was written to, and the folder that the reply was
    made in."""
    folder = tmp_path_factory.mktemp("ingest")
    output = tmp_path_factory.mktemp("output") / "result.json"
    size = ["--sequences", "256", "--tokens", "512", "--rounds", "1"]
    done = bench("ingest", *size, "--json", "--output", str(output), folder=folder)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout), output, folder


@pytest.mark.slow
def test_ingest_is_measured_from_socket_to_tensors(ingested):
    result, _, _ = ingested
    assert (result["sequences"], result["tokens"]) == (256, 512)
    assert result["reply_bytes"] > 20 * 256 * 512
    assert all(result[f"{name}_ms"] > 0 for name in ("orjson", "socket", "rows", "tensors"))
    assert result["total_ms"] == result["rows_ms"] + result["tensors_ms"]
    assert result["ratio"] == result["total_ms"] / result["orjson_ms"]
    assert result["memory_ratio"] == result["peak_bytes"] / result["reply_bytes"]


@pytest.mark.slow
def test_ingest_takes_little_memory(ingested):
    """A loose bound, because the batch is small; an object per token would break it."""
    assert 1 < ingested[0]["memory_ratio"] < 8


@pytest.mark.slow
def test_ingest_file_has_output_and_reply_is_gone(ingested):
    result, output, folder = ingested
    assert json.loads(output.read_text()) == result
    assert not list(folder.glob("trl_atropos_bench_*"))


@pytest.fixture(scope="module")
def looped(tmp_path_factory) -> tuple[dict, Path, Path]:
    """The result as printed, the file that it was written to, and the folder that the model was
    made in."""
    folder = tmp_path_factory.mktemp("loop")
    output = tmp_path_factory.mktemp("output") / "result.json"
    size = [
        "--latencies",
        "0,1",
        "--sequences",
        "16",
        "--tokens",
        "32",
        "--steps",
        "3",
        "--device_seconds",
        "2",
    ]
    done = bench("loop", *size, "--json", "--output", str(output), folder=folder)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout), output, folder


@pytest.mark.full  # `make bench` measures it
def test_sampling_overlaps_training_unless_strict(looped):
    """Loose bounds, because the machine is busy and the steps are few: one after the other takes
    twice as long."""
    at_once, as_long = looped[0]["rows"]
    assert (as_long["sampling_s"], as_long["strict_sampling_s"]) == (
        looped[0]["train_s"],
        looped[0]["strict_train_s"],
    )
    assert 0.9 < at_once["ratio"] < 1.5 and 0.9 < as_long["ratio"] < 1.5
    assert 0.9 < at_once["strict_ratio"] < 1.5 and 0.9 < as_long["strict_ratio"] < 1.5


@pytest.mark.full  # `make bench` measures it
def test_staleness_is_1_by_default_and_0_if_strict(looped):
    for row in looped[0]["rows"]:
        assert row["staleness_max"] == 1
        assert row["strict_staleness_max"] == 0


@pytest.mark.slow(60)
def test_loop_file_has_output_and_model_is_gone(tmp_path_factory):
    """A run that is too short to measure anything."""
    folder = tmp_path_factory.mktemp("loop")
    output = tmp_path_factory.mktemp("output") / "result.json"
    size = ["--latencies", "0", "--sequences", "8", "--tokens", "8", "--steps", "1"]
    size += ["--device_seconds", "0.1"]
    done = bench("loop", *size, "--json", "--output", str(output), folder=folder)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout)
    assert json.loads(output.read_text()) == result
    (row,) = result["rows"]
    assert row["staleness_max"] <= 1 and row["strict_staleness_max"] == 0
    assert not list(folder.glob("trl_atropos_bench_*"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--against", "trl", "--sides", "ours,theirs"],
            "'theirs' is none of ours, turns, two_servers, one_ahead, strict, no_logprobs, trl",
        ),
        (["--latencies", "0,fast"], "'fast' is no number of 0 or more: write it like 1.5"),
        (["--device_seconds", "-1"], "'-1' is no number of 0 or more"),
        (["--params", "20X"], "'20X' is no model size: write it like 20M"),
        (["--sequences", "9"], "--sequences 9 is not a multiple of --group_size 4"),
        (["--steps", "0"], "'0' is no number of 1 or more"),
    ],
)
def test_wrong_loop_flag_is_one_line_with_fix(arguments, message):
    done = bench("loop", *arguments)
    assert done.returncode != 0 and done.stdout == ""
    assert message in done.stderr and done.stderr.count("\n") == 1


def test_packed_loop_trains_each_rollout_as_if_alone(tiny_model):
    options = argparse.Namespace(rows=8, group_size=2, prompt=4, median=12, sigma=1.0, longest=40)
    rollouts = make_rows("spread", options)
    loop = PackedLoop(tiny_model, rollouts, max_tokens=64, checkpointing=False)
    assert len(loop.rows) > 1 and max(row.ids.numel() for row in loop.rows) <= 64
    assert loop.trained == sum(int(rollout.mask.sum()) for rollout in rollouts)
    alone = {tuple(row.ids[0].tolist()): row for one in rollouts for row in [Row([one], "cpu")]}
    for row in loop.rows:
        logprobs = loop._logprobs(row)
        for begin, end in pairwise(row.borders.tolist()):
            with torch.no_grad():
                expected = loop._logprobs(alone[tuple(row.ids[0, begin:end].tolist())])
            torch.testing.assert_close(logprobs[begin : end - 1], expected, rtol=1e-4, atol=1e-5)
    before = [parameter.clone() for parameter in loop.model.parameters()]
    loop.train()
    loop.step()
    assert all(
        not torch.equal(one, other)
        for one, other in zip(before, loop.model.parameters(), strict=True)
    )


def test_rows_of_a_route_are_those_that_it_is_compared_with(capsys):
    assert [row.name for row in sampling._rows(["chat"])] == [
        "engine, no log-probabilities",
        "engine, log-probabilities",
        "chat, no log-probabilities",
        "chat",
    ]
    with pytest.raises(SystemExit):
        sampling.build_parser().parse_args(["--routes", "chat,/v1/chat"])
    assert "'/v1/chat' is none of /generate, /v1/completions, chat" in capsys.readouterr().err


def test_model_of_words_samples_valid_text(tmp_path):
    """In which few tokens are frequent. Otherwise a benchmark measures how characters are put
    together from their parts."""
    make_model(tmp_path, "tiny", "float32", words=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    inputs = torch.tensor([[5, 7, 9, 11]])
    with torch.no_grad():
        probabilities = model(inputs).logits[0].softmax(dim=-1)  # of each next token
    texts = [tokenizer.decode([token]) for token in range(model.config.vocab_size)]
    is_text = torch.tensor([text.isascii() and text.isprintable() for text in texts])
    assert probabilities[:, is_text].sum(dim=-1).min() > 0.999
    likeliest = probabilities.topk(20).values.sum(dim=-1)
    assert likeliest.min() > 0.6 and likeliest.max() < 0.99


@pytest.mark.full  # it starts five servers
@pytest.mark.server
def test_calls_below_sessions_have_rows_beside_their_plain_routes():
    done = bench("sampling", "--clients", "2", "--tokens", "8", "--rounds", "1", "--json")
    assert done.returncode == 0, done.stderr[-4000:]
    rows = json.loads(done.stdout)["rows"]
    of_plain = {row["row"]: row.get("of_plain") for row in rows}
    in_sessions = [name for name in of_plain if name.startswith("session ")]
    assert len(in_sessions) == 6
    assert all(of_plain[name] > 0 for name in in_sessions)
    assert of_plain["chat"] is None


@pytest.mark.slow(20)
@pytest.mark.server
def test_engine_that_does_not_start_says_why(tmp_path):
    engine = Engine(
        tmp_path / "engine.log", tmp_path / "no_model", [], {FAST_LOGPROBS_VARIABLE: "1"}
    )
    try:
        with pytest.raises(SystemExit, match=r"exit code 1. The end of its log:(.|\n)*no_model"):
            engine.wait_ready()
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize(("config", "gpus"), [("single_gpu.yaml", ["3"]), ("sp2.yaml", ["1", "3"])])
def test_launched_process_sees_its_gpus(config, gpus, tmp_path):
    """Whatever the launcher itself sees: accelerate's files name GPUs of the machine."""
    script = tmp_path / "print_gpus.py"
    script.write_text("import os; print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True)\n")
    command = launched(config, str(script), gpus=gpus)
    environment = os.environ | run_variables() | {"CUDA_VISIBLE_DEVICES": "0"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert set(done.stdout.split()) == {",".join(gpus)}
