"""An Atropos environment in the style that its author has the least to write for:
`collect_trajectory` gives one rollout, and Atropos makes a group of as many as it asks for. An
answer scores 1 if the id of its first token is odd, else 0: every second does of a model that has
learned nothing. One in two rollouts says how often its answer has the first token, as a part of the
reward, and the environment logs how many it has sampled."""

import random

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataItem


class OneByOneEnv(BaseEnv):
    name = "one_by_one"

    @classmethod
    def config_init(cls):
        config = BaseEnvConfig(
            group_size=4,
            max_token_length=512,
            total_steps=-1,
            max_batches_offpolicy=1,
            ensure_scores_are_not_same=False,
            steps_per_eval=0,
            use_wandb=False,
            wandb_name="one_by_one",
        )
        return config, [APIServerConfig(server_type="vllm", api_key="none", timeout=600)]

    async def setup(self):
        self.random = random.Random(1)
        self.answers = 0

    async def get_next_item(self):
        return {"prompt": "".join(self.random.choice("stuvwxyz") for _ in range(4)) + "="}

    async def collect_trajectory(self, item):
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            await managed.completion(prompt=item["prompt"], n=1, max_tokens=8, temperature=1.0)
            (node,) = managed.get_state()["nodes"]
        first = next(token for token in node.masked_tokens if token >= 0)
        rollout = ScoredDataItem(
            tokens=node.tokens,
            masks=node.masked_tokens,
            inference_logprobs=node.logprobs,
            scores=float(first % 2),
        )
        self.answers += 1
        if self.answers % 2:
            share = node.masked_tokens.count(first) / len(node.masked_tokens)
            rollout["overrides"] = {"rewards": {"odd": first % 2 == 1, "repeats": share}}
        return rollout, []

    async def wandb_log(self, wandb_metrics=None):
        await super().wandb_log({"train/answers": self.answers, **(wandb_metrics or {})})

    async def evaluate(self, *args, **kwargs):
        pass


if __name__ == "__main__":
    OneByOneEnv.cli()
