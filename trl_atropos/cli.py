"""The `trl-atropos` command."""

import sys

USAGE = """usage: trl-atropos serve MODEL [--vllm_mode MODE] [any flag of `vllm serve`]

commands:
  serve   start the vLLM server that environments sample from and a trainer keeps in step with

Training is started with accelerate:
  accelerate launch --config_file configs/accelerate/cpu.yaml -m trl_atropos.train --config recipes/NAME/X.yaml
"""


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        sys.stdout.write(USAGE)
        sys.exit(0 if len(sys.argv) > 1 else 2)
    command, arguments = sys.argv[1], sys.argv[2:]
    if command != "serve":
        sys.exit(f"trl-atropos: unknown command {command!r}\n\n{USAGE}")
    from trl_atropos.server.launch import main as serve

    serve(arguments)


if __name__ == "__main__":
    main()
