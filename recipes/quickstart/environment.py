"""The quickstart's Atropos environment: repeat the prompt's first letter.

A prompt such as `cab=` asks for `cccccccccccc`; the reward is the share of right letters, so that a
model which has learned nothing yet still sees better and worse completions. It is written to be
copied: what an environment for this trainer has to do is marked (1) to (4).

    python recipes/quickstart/environment.py serve --env.rollout_server_url http://127.0.0.1:8000 \
        --env.tokenizer_name MODEL --openai.base_url http://127.0.0.1:9001/v1 --openai.model_name
        MODEL --slurm false
"""

import random

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from pydantic import Field

LETTERS = "abcdefgh"


class FirstLetterConfig(BaseEnvConfig):
    max_new_tokens: int = Field(default=12, description="Length of a completion in tokens")
    temperature: float = Field(default=1.0, description="Must equal the trainer's `temperature`")
    seed: int = Field(default=0, description="Seed of the prompts")


class FirstLetterEnv(BaseEnv):
    name = "first_letter"
    env_config_cls = FirstLetterConfig

    @classmethod
    def config_init(cls):
        config = FirstLetterConfig(
            group_size=8,
            max_token_length=512,
            total_steps=-1,  # as many as the trainer takes
            max_batches_offpolicy=1,  # sample at most one batch ahead of the trainer
            # the trainer counts groups without variance; dropping them here
            ensure_scores_are_not_same=False,
            # would distort the reward curve, and starve the run once the task is learned
            steps_per_eval=0,
            use_wandb=False,
            wandb_name="first_letter",  # the API takes no environment without a name
            include_messages=False,
        )
        # (1) A list, even of one: a single config would ignore `base_url`. And `vllm`, the server
        # type that returns token ids and log-probabilities.
        return config, [APIServerConfig(server_type="vllm", api_key="none", timeout=600)]

    async def setup(self):
        self.random = random.Random(self.config.seed)

    # called where the run has had batches already: go on with other questions
    def load_checkpoint(self):
        self.random.seed(self.config.seed + self.curr_step)

    async def get_next_item(self):
        return {"prompt": "".join(self.random.choice(LETTERS) for _ in range(3)) + "="}

    async def collect_trajectories(self, item):
        # (2) A managed server keeps the tokens, masks and log-probabilities exactly as they were
        # sampled.
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            completions = await managed.completion(
                prompt=item["prompt"],
                n=self.config.group_size,
                max_tokens=self.config.max_new_tokens,
                temperature=self.config.temperature,
            )
            nodes = managed.get_state()["nodes"]
        group = ScoredDataGroup(tokens=[], masks=[], scores=[], inference_logprobs=[])
        for choice, node in zip(completions.choices, nodes, strict=True):
            group["tokens"].append(node.tokens)
            group["masks"].append(node.masked_tokens)
            # (3) lets the trainer correct for stale rollouts
            group["inference_logprobs"].append(node.logprobs)
            group["scores"].append(score(item["prompt"], choice.text or ""))
        # (4) lets the trainer check that both sides mean the same temperature
        group["generation_params"] = {"temperature": self.config.temperature}
        return group, []

    async def evaluate(self, *args, **kwargs):
        """Nothing to do: the training reward says it all here."""


def score(prompt: str, completion: str) -> float:
    """Share of the completion's letters that are the prompt's first."""
    return sum(letter == prompt[0] for letter in completion) / max(1, len(completion))


if __name__ == "__main__":
    FirstLetterEnv.cli()
