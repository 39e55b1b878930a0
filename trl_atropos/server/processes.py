"""Names by which the processes of a vLLM server know each other. Imports nothing: `plugin.py` is
loaded in every process of every vLLM."""

# `launch.py` sets it: vLLM's processes below have been started by this package.
SERVER_VARIABLE = "TRL_ATROPOS_SERVER"
# "0" leaves vLLM's own way of log-probabilities: `trl-atropos serve --fast_logprobs false`
FAST_LOGPROBS_VARIABLE = "TRL_ATROPOS_FAST_LOGPROBS"
ENGINE_PROCESS = "EngineCore"  # beginning of the names of vLLM's engine processes
