"""The environment of two turns, with a template that strips reasoning: its episodes branch.

What makes rollouts of such episodes is `episode`; nothing else is different from an environment
whose episodes do not branch.
"""

import random

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig

import trl_atropos

# As templates of reasoning models do, it opens `<think>` for the model, and leaves out what an
# earlier turn thought.
TEMPLATE = (
    "{% for message in messages %}"
    "{{ message['role'][0] + ':' + message['content'].split('</think>')[-1] + ';' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a:<think>' }}{% endif %}"
)
TURNS = 3


class BranchingEnv(BaseEnv):
    name = "branching"

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
            wandb_name="branching",
        )
        return config, [APIServerConfig(server_type="vllm", api_key="none", timeout=600)]

    async def setup(self):
        self.random = random.Random(0)
        self.tokenizer.chat_template = TEMPLATE

    async def get_next_item(self):
        return {"letter": self.random.choice("abcdefgh")}

    async def collect_trajectory(self, item):
        messages = [{"role": "user", "content": f"say {item['letter']}"}]
        texts = []
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            for turn in range(TURNS):
                reply = await managed.chat_completion(
                    messages=messages, n=1, max_tokens=6, temperature=1.0
                )
                text = reply.choices[0].message.content or ""
                texts.append(text)
                messages.append({"role": "assistant", "content": text})
                if turn + 1 < TURNS:
                    messages.append({"role": "user", "content": "again"})
            rollout = trl_atropos.episode(managed.get_state()["nodes"])
        score = "".join(texts).count(item["letter"]) / (6 * TURNS) + self.random.random() * 0.01
        rollout["overrides"]["inference_logprobs"] = rollout["inference_logprobs"]
        return rollout | {"scores": score}, []

    async def evaluate(self, *args, **kwargs):
        pass


if __name__ == "__main__":
    BranchingEnv.cli()
