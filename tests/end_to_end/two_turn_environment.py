"""An Atropos environment as somebody else would write it: two turns, so that the masks have holes.

It knows nothing of the trainer. First turn: any answer. Second turn, after the user's reply: repeat
one letter. It is started with nothing but URLs, a model and a group size.
"""

import asyncio
import random

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup


class TwoTurnEnv(BaseEnv):
    name = "two_turn"

    @classmethod
    def config_init(cls):
        config = BaseEnvConfig(
            group_size=4,
            max_token_length=512,
            total_steps=-1,
            max_batches_offpolicy=2,
            ensure_scores_are_not_same=False,
            steps_per_eval=0,
            use_wandb=False,
            wandb_name="two_turn",
        )
        return config, [APIServerConfig(server_type="vllm", api_key="none", timeout=600)]

    async def setup(self):
        self.random = random.Random(self.config.group_size)

    async def get_next_item(self):
        return {"letter": self.random.choice("abcdefgh")}

    async def collect_trajectories(self, item):
        rollouts = await asyncio.gather(
            *(self.one(item["letter"]) for _ in range(self.config.group_size))
        )
        group = ScoredDataGroup(tokens=[], masks=[], scores=[], inference_logprobs=[])
        for node, score in rollouts:
            group["tokens"].append(node.tokens)
            group["masks"].append(node.masked_tokens)
            group["inference_logprobs"].append(node.logprobs)
            group["scores"].append(score)
        return group, []

    async def one(self, letter: str):
        messages = [{"role": "user", "content": f"say {letter}"}]
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            for turn in range(2):
                reply = await managed.chat_completion(
                    messages=messages, n=1, max_tokens=6, temperature=1.0
                )
                text = reply.choices[0].message.content or ""
                messages = [*messages, {"role": "assistant", "content": text}]
                if turn == 0:
                    messages.append({"role": "user", "content": "again"})
            node = managed.get_state()["nodes"][-1]
        return node, text.count(letter) / 6 + self.random.random() * 0.01

    async def evaluate(self, *args, **kwargs):
        pass


if __name__ == "__main__":
    TwoTurnEnv.cli()
