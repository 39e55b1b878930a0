"""The processes of `trl-atropos bench ingest`: `serve FILE`, `times URL FILE ROUNDS`, and `memory
URL`.

The last two print one JSON object.
"""

import http.server
import json
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY = 151_936  # Qwen3's, whose ids are as long as most models'
PROMPT_SHARE = 16  # of a sequence, one in so many tokens is the prompt's


def write_reply(path: Path, sequences: int, tokens: int, group_size: int) -> None:
    """The reply of the Atropos API with one batch: random tokens, with masks and log-probabilities
    as Atropos's."""
    rng = np.random.default_rng(0)
    prompt = max(1, tokens // PROMPT_SHARE)
    with path.open("w", encoding="ascii") as file:
        file.write('{"batch":[')
        for i in range(sequences // group_size):
            ids = rng.integers(0, VOCABULARY, (group_size, tokens))
            masks = ids.copy()
            # as a server gives them: of float32
            logprobs = -rng.exponential(1.0, ids.shape).astype(np.float32)
            masks[:, :prompt], logprobs[:, :prompt] = -100, 1.0
            group = {
                "tokens": ids.tolist(),
                "masks": masks.tolist(),
                "scores": rng.random(group_size).tolist(),
                "advantages": None,
                "ref_logprobs": None,
                "messages": None,
                "generation_params": {"temperature": 1.0},
                "inference_logprobs": logprobs.tolist(),
                "overrides": None,
                "group_overrides": {},
                "images": None,
                "env_id": 0,
                "distill_token_ids": None,
                "distill_logprobs": None,
            }
            file.write("," * bool(i) + json.dumps(group, separators=(",", ":")))
        file.write("]}")


def replying(body: bytes) -> type[http.server.BaseHTTPRequestHandler]:
    """A handler that answers every GET with `body`, as JSON."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


def serve(path: Path) -> None:
    """Answers every request with the bytes of the file. Prints its URL."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), replying(path.read_bytes())) as server:
        sys.stdout.write(f"http://127.0.0.1:{server.server_address[1]}\n")
        sys.stdout.flush()
        server.serve_forever()


def measure_times(url: str, path: Path, rounds: int) -> dict[str, float]:
    """Medians in ms, of rounds in which every candidate has its turn."""
    import orjson

    body = path.read_bytes()
    pull, make_tensors = _ingest(url)
    times: dict[str, list[float]] = {"orjson": [], "socket": [], "rows": [], "tensors": []}
    for _ in range(rounds + 1):
        _timed(times["orjson"], orjson.loads, body)
        _timed(times["socket"], _read, url)
        rows = _timed(times["rows"], pull)
        _timed(times["tensors"], make_tensors, rows)
        del rows
    return {f"{name}_ms": statistics.median(values[1:]) * 1e3 for name, values in times.items()}


def measure_memory(url: str) -> dict[str, int]:
    """The most bytes of memory that this process had, beyond those before the request."""
    pull, make_tensors = _ingest(url)
    before = _memory("VmRSS")
    make_tensors(pull())
    return {"peak_bytes": _memory("VmHWM") - before}


def _timed(times: list[float], call: Callable[..., Any], *arguments: object) -> Any:
    started = time.perf_counter()
    result = call(*arguments)
    times.append(time.perf_counter() - started)
    return result


def _read(url: str) -> None:
    with urllib.request.urlopen(f"{url}/batch") as response:
        response.read()


def _memory(name: str) -> int:
    """In bytes, of this process; Linux tells it in kB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")


def _ingest(url: str) -> tuple[Callable[[], Sequence], Callable[[Sequence], dict]]:
    """What pulls a batch and admits it, and what makes the tensors of its rows; all that they
    import is imported."""
    import torch
    from trl.trainer.utils import pad

    from trl_atropos.batches.inputs import columns
    from trl_atropos.rollouts.api import AtroposClient
    from trl_atropos.rollouts.intake import Intake

    client = AtroposClient(url, request_timeout=60.0, batch_timeout=60.0)
    intake = Intake(2**31 - 1, 1.0, "refuse", vocab_size=VOCABULARY)

    def pull() -> Sequence:
        rows = intake.admit(client.batch().batch)
        assert rows, "every sequence was dropped"
        return rows

    def make_tensors(rows: Sequence) -> dict[str, torch.Tensor]:
        """As `GRPOTrainer._generate_and_score_completions` does in TRL 1.16, on the CPU."""
        handed_over = columns(rows)
        prompts = [torch.tensor(ids) for ids in handed_over["prompt_ids"]]
        completions = [torch.tensor(ids) for ids in handed_over["completion_ids"]]
        masks = [torch.tensor(mask) for mask in handed_over["env_mask"]]
        logprobs = [
            torch.tensor([float("nan") if value is None else value for value in values])
            for values in handed_over["logprobs"]
        ]
        return {
            "prompt_ids": pad(prompts, 0, "left"),
            "prompt_mask": pad([torch.ones_like(ids) for ids in prompts], 0, "left"),
            "completion_ids": pad(completions, 0, "right"),
            "completion_mask": pad([torch.ones_like(ids) for ids in completions], 0, "right"),
            "sampling_per_token_logps": pad(logprobs, 0.0, "right"),
            "tool_mask": pad(masks, 1, "right"),
        }

    return pull, make_tensors


def main() -> None:
    role, *arguments = sys.argv[1:]
    if role == "serve":
        serve(Path(arguments[0]))
    elif role == "times":
        sys.stdout.write(
            json.dumps(measure_times(arguments[0], Path(arguments[1]), int(arguments[2]))) + "\n"
        )
    else:
        sys.stdout.write(json.dumps(measure_memory(arguments[0])) + "\n")


if __name__ == "__main__":
    main()
