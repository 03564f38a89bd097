"""GRPO in one file: a tiny agent learns to use a calculator. Torch alone, and a tokenizer with its chat template.

    python examples/grpo_in_one_file.py          # three minutes on two cores

The model (half a million weights, shipped with mtgrpo) is the pupil of a careless teacher: most of its answers are
guesses in the head, and wrong. It can call the tool; nobody tells it to. A step plays GROUP conversations for each of
PROMPTS problems, pays 1 for a right answer, and makes what did better than its siblings more likely. `mtgrpo train`
does the same, computes what is shared once, and checks itself; here every line can be read.
"""

import random
import re
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from mtgrpo.model.tiny import WEIGHTS, load_tokenizer

STEPS, PROMPTS, GROUP, MAX_TURNS, MAX_NEW = 25, 32, 8, 5, 32
LR, CLIP_LOW, CLIP_HIGH = 2e-3, 0.2, 0.28
WIDTH, LAYERS, HEADS, HEAD, INNER, VOCABULARY = 96, 3, 3, 32, 256, 2048

# --- the model: a transformer as Qwen3 is, over rows that are padded on the left -------------------------------------


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, HEADS * HEAD, bias=False) for _ in range(3))
        self.o_proj = nn.Linear(HEADS * HEAD, WIDTH, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(HEAD, 1e-6), nn.RMSNorm(HEAD, 1e-6)
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(WIDTH, 1e-6), nn.RMSNorm(WIDTH, 1e-6)
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor, rotation: Tensor, allowed: Tensor, cache: list[Tensor]) -> Tensor:
        """`cache` holds the keys and values of the tokens before, and takes those of these."""
        h = self.input_layernorm(x)
        q, k, v = (p(h).unflatten(-1, (HEADS, HEAD)) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(self.q_norm(q), rotation), rotate(self.k_norm(k), rotation)
        cache[:] = [torch.cat([old, new], 1) for old, new in zip(cache, (k, v), strict=True)] if cache else [k, v]
        q, k, v = q.transpose(1, 2), cache[0].transpose(1, 2), cache[1].transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        x = x + self.o_proj(mixed.transpose(1, 2).flatten(2))
        h = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotary positions (arXiv:2104.09864): pairs of channels turn by an angle that grows with the position."""
    a, b = x.chunk(2, -1)
    cos, sin = rotation.cos()[..., None, :], rotation.sin()[..., None, :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH, 1e-6)
        saved = load_file(WEIGHTS / "model.safetensors")  # names as in transformers, without the folders of a layer
        short = {re.sub(r"^model\.|self_attn\.|mlp\.", "", name): weight for name, weight in saved.items()}
        self.load_state_dict({name: short[name] for name in self.state_dict()})

    def forward(self, tokens: Tensor, real: Tensor, caches: list[list[Tensor]] | None = None) -> Tensor:
        """Logits [rows, new tokens, vocabulary] of `tokens`; `real` [rows, all tokens so far] is False on padding."""
        new, total = tokens.shape[1], real.shape[1]
        position = (real.cumsum(1) - 1).clamp(min=0)[:, -new:]
        causal = torch.ones(new, total, dtype=torch.bool).tril(total - new)
        allowed = causal & real[:, None, :] | torch.eye(total, dtype=torch.bool)[-new:]  # padding sees itself: no NaN
        x = self.embed_tokens(tokens)
        rotation = position[..., None] * (1 / 10_000.0 ** (torch.arange(0, HEAD, 2) / HEAD)).to(x.dtype)
        for layer, cache in zip(self.layers, caches or [[] for _ in self.layers], strict=True):
            x = layer(x, rotation, allowed[:, None], cache)
        return self.norm(x) @ self.embed_tokens.weight.T


# --- the task, its tool and its reward --------------------------------------------------------------------------------

TOOL = {
    "name": "calculator",
    "description": "Evaluate an arithmetic expression.",
    "parameters": {
        "type": "object",
        "properties": {"expression": {"type": "string"}},
        "required": ["expression"],
    },
}
WORDS = {"+": "{who} buys {n} more.", "-": "{who} sells {n}.", "*": "Then {who} makes it {n} times as many."}


def make_problem(rng: random.Random) -> tuple[str, str]:
    """A chain of two to four calculations as a story, and its answer."""
    while True:
        who, things = rng.choice(["Tom", "Ann", "Eva", "Leo"]), rng.choice(["pens", "books"])
        value = rng.randint(100, 999)
        told = [f"{who} has {value} {things}."]
        for sign in rng.choices("+-*", k=rng.randint(2, 4)):
            n = rng.randint(12, 99) if sign == "*" else rng.randint(100, 999)
            value = {"+": value + n, "-": value - n, "*": value * n}[sign]
            told.append(WORDS[sign].format(who=who, n=n))
        if 0 <= value < 1_000_000:
            return " ".join([*told, f"How many {things} does {who} have?"]), str(value)


def calculate(text: str) -> str:
    """What the tool answers to the model's words. A mistake of the model is an answer too, not an exception."""
    found = re.search(r'"expression": "(\d+) ([-+*]) (\d+)"', text)
    if not found:
        return "error: cannot read that"
    a, sign, b = int(found[1]), found[2], int(found[3])
    return str({"+": a + b, "-": a - b, "*": a * b}[sign])


# --- a rollout: turns and tools, until the model gives no call --------------------------------------------------------


@dataclass
class Conversation:
    answer: str
    tokens: list[int]  # all of it, as the model saw and wrote it
    sampled: list[bool] = field(default_factory=list)  # by token: did the policy write it? Only those are trained
    logprob: list[float] = field(default_factory=list)  # by token: of the policy that sampled, 0 for the others
    reward: float = 0.0

    def add(self, tokens: list[int], logprob: list[float] | None = None) -> None:
        self.tokens += tokens
        self.sampled += [logprob is not None] * len(tokens)
        self.logprob += logprob or [0.0] * len(tokens)


def begin(tokenizer, problem: str, answer: str) -> Conversation:
    messages = [{"role": "user", "content": problem}]
    text = tokenizer.apply_chat_template(messages, tools=[TOOL], add_generation_prompt=True, tokenize=False)
    conversation = Conversation(answer, [])
    conversation.add(tokenizer.encode(text))
    return conversation


def pad(rows: list[list], value: float) -> Tensor:
    """[rows, longest], padded on the left."""
    longest = max(map(len, rows))
    return torch.tensor([[value] * (longest - len(row)) + row for row in rows])


@torch.no_grad()
def sample_turn(model: Model, conversations: list[Conversation], end: int, greedy: bool) -> list[list[int]]:
    """One turn of each: tokens until the end of the message, at temperature 1, appended with their log-probability."""
    tokens = pad([c.tokens for c in conversations], 0)
    real = pad([[1] * len(c.tokens) for c in conversations], 0).bool()
    caches: list[list[Tensor]] = [[] for _ in model.layers]
    turns: list[list[int]] = [[] for _ in conversations]
    logprobs: list[list[float]] = [[] for _ in conversations]
    for _ in range(MAX_NEW):
        scores = model(tokens, real, caches)[:, -1].log_softmax(-1)
        tokens = scores.argmax(-1, keepdim=True) if greedy else torch.multinomial(scores.exp(), 1)
        real = torch.cat([real, real.new_ones(len(real), 1)], 1)
        for turn, logprob, token, row in zip(turns, logprobs, tokens[:, 0].tolist(), scores, strict=True):
            if end not in turn:
                turn.append(token)
                logprob.append(row[token].item())
        if all(end in turn for turn in turns):
            break
    for conversation, turn, logprob in zip(conversations, turns, logprobs, strict=True):
        conversation.add(turn, logprob)
    return turns


def play(model: Model, tokenizer, problems: list[tuple[str, str]], greedy: bool = False) -> list[Conversation]:
    """Conversations from their prompt to their reward; each turn of all that still go on is one batch."""
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    conversations = going = [begin(tokenizer, *problem) for problem in problems]
    for _ in range(MAX_TURNS):
        asking = []
        for conversation, turn in zip(going, sample_turn(model, going, end, greedy), strict=True):
            text = tokenizer.decode(turn).removesuffix("<|im_end|>")
            if "<tool_call>" in text and turn[-1] == end:  # what the tool says is context: never trained
                said = f"\n<|im_start|>user\n<tool_response>\n{calculate(text)}\n</tool_response><|im_end|>\n"
                conversation.add(tokenizer.encode(said + "<|im_start|>assistant\n"))
                asking.append(conversation)
            else:
                conversation.reward = float(text.strip().endswith(f"#### {conversation.answer}"))
        going = asking
        if not going:
            break
    return conversations


# --- GRPO (arXiv:2402.03300) ------------------------------------------------------------------------------------------


def advantages(rewards: Tensor) -> Tensor:
    """How much better than its siblings, [problems, GROUP]. The paper divides by their spread too."""
    return rewards - rewards.mean(1, keepdim=True)


def grpo_loss(model: Model, conversations: list[Conversation], advantage: Tensor) -> Tensor:
    """The clipped surrogate, averaged over all sampled tokens; `advantage` [conversations]."""
    tokens = pad([c.tokens for c in conversations], 0)
    real = pad([[1] * len(c.tokens) for c in conversations], 0).bool()
    sampled = pad([c.sampled for c in conversations], 0).bool()[:, 1:]
    old = pad([c.logprob for c in conversations], 0.0)[:, 1:]
    scores = model(tokens, real)[:, :-1].log_softmax(-1)
    logp = scores.gather(-1, tokens[:, 1:, None])[..., 0]  # of each token, given the ones before
    ratio = (logp - old).exp()
    gain = torch.min(ratio * advantage[:, None], ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantage[:, None])
    return -gain[sampled].sum()  # the caller divides, by the tokens of the whole step


def step(model: Model, tokenizer, optimizer: torch.optim.Optimizer, rng: random.Random) -> float:
    """Play, compare siblings, update; the share of right answers."""
    problems = [make_problem(rng) for _ in range(PROMPTS)]
    played = play(model, tokenizer, [problem for problem in problems for _ in range(GROUP)])
    advantage = advantages(torch.tensor([c.reward for c in played]).view(PROMPTS, GROUP)).flatten()
    count = sum(sum(c.sampled) for c in played)
    for part in range(0, len(played), 64):  # micro-batches: their gradients add up to the batch's
        (grpo_loss(model, played[part : part + 64], advantage[part : part + 64]) / count).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return sum(c.reward for c in played) / len(played)


def success(model: Model, tokenizer, greedy: bool) -> float:
    """On a hundred problems that training does not see."""
    rng = random.Random("held out")
    played = play(model, tokenizer, [make_problem(rng) for _ in range(100)], greedy)
    return sum(c.reward for c in played) / len(played)


def main(seed: int = 0) -> None:
    torch.manual_seed(seed)
    rng, tokenizer, model = random.Random(seed), load_tokenizer(), Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    print(f"before: sampled {success(model, tokenizer, False):.2f}, greedy {success(model, tokenizer, True):.2f}")
    for number in range(1, STEPS + 1):
        for group in optimizer.param_groups:
            group["lr"] = LR * min(number / 3, (STEPS - number + 1) / STEPS)
        print(f"step {number:3}: right answers {step(model, tokenizer, optimizer, rng):.2f}", flush=True)
    print(f"after: sampled {success(model, tokenizer, False):.2f}, greedy {success(model, tokenizer, True):.2f}")


if __name__ == "__main__":
    main()
