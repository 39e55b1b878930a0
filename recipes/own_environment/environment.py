"""Your own environment: change what is marked (1) to (4). The rest is what every one needs.

As it stands, it asks to continue a row of letters, such as `cccccccc`; the reward is the share of
the answer that is this letter. A tiny random model learns it in a minute on two CPU cores.
"""

import random

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from pydantic import Field

LETTERS = "abcdefgh"


class OwnConfig(BaseEnvConfig):
    # (1) Your settings. A recipe changes them: `config: {max_new_tokens: 64}` beside the `path`.
    max_new_tokens: int = Field(default=64, description="Length of a completion in tokens")
    temperature: float = Field(default=1.0, description="Must equal the trainer's `temperature`")
    seed: int = Field(default=0, description="Seed of the prompts")


class OwnEnv(BaseEnv):
    name = "own"
    env_config_cls = OwnConfig

    @classmethod
    def config_init(cls):
        config = OwnConfig(
            group_size=8,  # rollouts of one prompt; the trainer's batch is a multiple of it
            max_token_length=512,  # prompt and completion; groups with longer ones are lost
            total_steps=-1,  # as many as the trainer takes
            max_batches_offpolicy=1,  # sample at most one batch ahead of the trainer
            ensure_scores_are_not_same=False,  # the trainer counts or replaces such groups
            steps_per_eval=0,
            use_wandb=False,
            wandb_name=cls.name,  # the API takes no environment without a name
            include_messages=False,
        )
        # A list: Atropos ignores `base_url` of a single config. `vllm` sends log-probabilities.
        return config, [APIServerConfig(server_type="vllm", api_key="none", timeout=600)]

    async def setup(self):
        # (2) Load your data. Here, it is drawn, and evaluations draw it with another seed.
        self.random = random.Random(self.config.seed)

    def load_checkpoint(self):  # if the run has had batches already: go on with other questions
        self.random.seed(self.config.seed + self.curr_step)

    async def get_next_item(self):
        # (3) One item of it, as a dictionary; the trainer's step never waits for this.
        letter = self.random.choice(LETTERS)
        return {"prompt": f"Continue: {letter * 8}", "letter": letter}

    async def collect_trajectories(self, item):
        # A managed server keeps tokens, masks and log-probabilities exactly as they were sampled.
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            completions = await managed.chat_completion(
                messages=[{"role": "user", "content": item["prompt"]}],
                n=self.config.group_size,
                max_tokens=self.config.max_new_tokens,
                temperature=self.config.temperature,
            )
            end_turn(managed, self.tokenizer)  # after each turn; another one could follow here
            nodes = managed.get_state()["nodes"]
        group = ScoredDataGroup(tokens=[], masks=[], scores=[], inference_logprobs=[], overrides=[])
        for choice, node in zip(completions.choices, nodes, strict=True):
            group["tokens"].append(node.tokens)
            group["masks"].append(node.masked_tokens)
            group["inference_logprobs"].append(node.logprobs)
            group["scores"].append(score(choice.message.content or "", item))
            # A part of the reward: logged as `reward/ended`, and not trained on.
            group["overrides"].append({"rewards": {"ended": choice.finish_reason == "stop"}})
        # the trainer compares it with its own
        group["generation_params"] = {"temperature": self.config.temperature}
        return group, []  # what is returned second is put back into the queue of items

    async def evaluate(self, *args, **kwargs):
        """Never called, with `steps_per_eval=0`; Atropos wants it there."""


def end_turn(managed, tokenizer) -> None:
    """Keeps the end token of a turn from standing twice in the next prompt. Atropos takes it out of
    the message, the chat template puts it back, and the sampled tokens have it already."""
    for node in managed.get_state()["nodes"]:
        ended = node.tokens[-1] == tokenizer.eos_token_id
        if ended and not node.full_text.endswith(tokenizer.eos_token):
            node.full_text += tokenizer.eos_token


def score(completion: str, item: dict) -> float:
    """(4) Your reward: any number, compared within its group. Here the share of right letters."""
    return completion.count(item["letter"]) / max(1, len(completion))


if __name__ == "__main__":
    OwnEnv.cli()
