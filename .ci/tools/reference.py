"""Write the parts of the documentation that follow from the code: `python .ci/tools/reference.py`.

These are docs/cli.md, from the help of the commands, and the table of settings in each page of docs/algorithms, from
the attributes of the classes. A test compares both with the code.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

from pearl.algorithms import ALGORITHMS, Trainer
from pearl.algorithms.update_frequency import SPELLINGS
from pearl.errors import PearlError

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
BEGIN, END = "<!-- settings of {}: made by .ci/tools/reference.py -->\n", "<!-- end of settings -->\n"
CLI_NOTE = "<!-- Made from the help of the commands, by .ci/tools/reference.py. -->\n\n# The command line\n"

MEANINGS = {
    "action_masks": "choose among the actions that the environment allows: see "
    "[action masks](../environments.md#action-masks)",
    "activation": '`"tanh"` or `"relu"`, in the default networks',
    "actor_learning_rate": "of Adam, for the policy",
    "adam_beta1": "of Adam, but for the temperature's",
    "batch_norm_momentum": "of the running statistics",
    "batch_size": "transitions in a gradient step",
    "A2C.batch_size": "transitions in a gradient step; 0: the whole rollout",
    "burn_in": "steps at the beginning of a sequence that only refresh the state; at most `sequence_overlap`",
    "callbacks": "objects that the program calls while it runs: see [callbacks](../callbacks.md)",
    "cell": 'recurrent layer: `"lstm"` or `"gru"`',
    "clip_range": "how far the ratio of new to old probability counts from 1",
    "clip_range_schedule": "factor of the range over the run: see [schedules](../schedules.md)",
    "cnn": 'trunk for images: `"nature"` or `"impala"`',
    "correction": 'with `policy_lag=1`: `"clip"`, by the clipped ratio alone, or `"vtrace"`, by V-trace advantages',
    "critic_hidden_sizes": "sizes of the critics' hidden layers",
    "double": "the online network chooses the next action, the target network values it",
    "dropped_quantiles": "of each critic, the largest of all quantiles that targets leave out; the more, the lower are "
    "values estimated",
    "dropout": "share of numbers that each hidden layer of a critic drops",
    "dueling": "separate value and advantage in the network",
    "entropy_coefficient": "weight of the entropy in the loss",
    "epochs": "passes over a rollout",
    "exploration": "what changes the policy's actions while data are collected; `None`: nothing",
    "gae_lambda": "lambda of generalized advantage estimation",
    "gamma": "discount",
    "gradient_steps": "of [Stable-Baselines3](../rl_zoo.md#train_freq-and-gradient_steps), with `train_freq`",
    "hidden_sizes": "sizes of the default networks' hidden layers",
    "horizon": "steps of each environment in a rollout",
    "hindsight_goals": "further transitions of each step, with goals reached later: see "
    "[goals](../environments.md#goals)",
    "initial_log_std": "log deviation of `Box` actions at the start",
    "initial_temperature": "where a learned temperature starts",
    "layer_norm": "normalise the hidden layers of an MLP, so that values stay within what is possible",
    "learning_rate": "of Adam; where there is a separate policy network, of the critics",
    "learning_rate_schedule": "factor of the rates over the run: see [schedules](../schedules.md)",
    "learning_starts": "transitions before the first gradient step",
    "least_updates_per_step": 'the fewest batches for each transition with `replay_ratio="auto"`',
    "log_std_bounds": "bounds of the policy's log deviations",
    "max_grad_norm": "largest norm of the gradient; 0: any",
    "most_updates_per_step": 'the most batches for each transition with `replay_ratio="auto"`',
    "n_step": "length of n-step returns",
    "noise_clip": "bound of the noise on target actions, in half action ranges",
    "normalize_advantages": "shift and scale the advantages of each minibatch to mean 0 and deviation 1",
    "normalize_observations": "shift and scale observations by their statistics so far: see "
    "[normalisation](../environments.md#normalisation)",
    "num_critics": "critics of the ensemble",
    "num_quantiles": "quantiles of the return that a network gives",
    "orthogonal": "begin with orthogonal weights; otherwise as torch's layers begin",
    "policy_delay": "gradient steps for each update of the policy; of TD3 also of the targets",
    "policy_lag": "1: the next rollout is collected while one is trained on",
    "priority_eta": "share of the largest TD error in a sequence's priority; the rest is the mean",
    "quantization_bits": "bits of rewards and values while they wait for GAE; 0: float32",
    "recurrent_size": "size of the recurrent layer",
    "renorm_warmup_steps": "batches before the running statistics begin to correct a batch's",
    "replay_ratio": "samples trained for each transition collected",
    "reward_standardization": '`"returns"`: divide rewards by the running deviation of the discounted return '
    "([more kinds on-policy](../on_policy.md#gae-and-heppos-pieces))",
    "saturation_penalty": "weight of the penalty on outputs beyond 2 before tanh",
    "scale_observations": "scale observations to [-1, 1] by the bounds of their space",
    "sequence_length": "steps in a sequence, which is trained on as a whole",
    "sequence_overlap": "steps that a sequence has in common with the one before",
    "shared_layers": "policy and value network share their hidden layers",
    "target_critics": "critics, drawn for each step, whose smallest value is the target",
    "target_entropy": "entropy that a learned temperature aims at; `None`: minus the size of an action",
    "target_kl": "training on a rollout ends when the KL divergence exceeds 1.5 times this; `None`: never",
    "target_noise": "deviation of the noise on target actions, in half action ranges",
    "target_update_interval": "gradient steps between copies to the target network, where `tau` is 1",
    "tau": "how far targets move toward the networks in an update; 1: a copy",
    "temperature": "weight of the entropy; `None`: learned",
    "temperature_learning_rate": "of Adam, for a learned temperature",
    "train_freq": "of [Stable-Baselines3](../rl_zoo.md#train_freq-and-gradient_steps), in place of `replay_ratio`",
    "value_clip_range": "how far values count from the old ones, where that is the larger error; 0: any distance",
    "value_coefficient": "weight of the value loss",
    "value_standardization": "see [on-policy training](../on_policy.md#gae-and-heppos-pieces)",
}


class ReferenceError(PearlError):
    """A page lacks the place of its table, or a setting has no description."""


def settings_of(algorithm: type[Trainer]) -> dict[str, object]:
    """Return the settings of an algorithm, with their defaults, by name."""
    names = {name for base in algorithm.__mro__ for name in vars(base).get("__annotations__", {})}
    found = {name: getattr(algorithm, name) for name in names if not name.startswith("_") and hasattr(algorithm, name)}
    unused = {*algorithm._unused, *(() if algorithm._knows_masks else ("action_masks",))}
    written = {kept_as: name for name, kept_as in SPELLINGS.items()}
    return {written.get(name, name): value for name, value in sorted(found.items()) if name not in unused}


def shown(value: object) -> str:
    """Return a default as code; of a dataclass, only what differs from its own defaults."""
    if dataclasses.is_dataclass(value):
        fields = [(field, getattr(value, field.name)) for field in dataclasses.fields(value)]
        changed = ", ".join(f"{field.name}={held!r}" for field, held in fields if held != field.default)
        return f"`{type(value).__name__}({changed})`"
    return f"`{value!r}`".replace("'", '"')


def settings_table(name: str, algorithm: type[Trainer]) -> str:
    """Return the table of an algorithm's settings, between its marks."""
    rows = []
    for setting, default in settings_of(algorithm).items():
        if setting not in MEANINGS:
            raise ReferenceError(
                f"{name} has a setting {setting!r}, of which MEANINGS in .ci/tools/reference.py lacks a line."
            )
        meaning = MEANINGS.get(f"{name}.{setting}", MEANINGS[setting])
        rows.append(f"| `{setting}` | {shown(default)} | {meaning} |\n")
    return BEGIN.format(name) + "\n| setting | default | meaning |\n|---|---|---|\n" + "".join(rows) + "\n" + END


def with_settings(page: str, name: str, algorithm: type[Trainer]) -> str:
    """Return the text of a page with the present table; raises ReferenceError if it has no place for one."""
    begin, rest = BEGIN.format(name), r".*?" + re.escape(END)
    table = settings_table(name, algorithm)
    text, count = re.subn(re.escape(begin) + rest, lambda _: table, page, flags=re.DOTALL)
    if count != 1:
        raise ReferenceError(f"Expected one table between {begin.strip()} and {END.strip()}; found {count}.")
    return text


def cli_page() -> str:
    """Return docs/cli.md, as typer describes the commands."""
    command = (sys.executable, "-m", "typer", "pearl.cli", "utils", "docs", "--name", "pearl")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        raise ReferenceError(f"typer could not describe the commands: {done.stderr.strip()}")
    text = done.stdout.split("\n", 1)[1].replace("\n\n\n", "\n\n")
    # typer cuts the list of commands off at 45 characters: say all of it, as each command's section begins.
    first = dict(re.findall(r"^## `pearl ([\w-]+)`\n\n(.+?)\n\n", text, re.MULTILINE | re.DOTALL))
    listed = r"^\* `(" + "|".join(map(re.escape, first)) + r")`: .*$"
    text = re.sub(
        listed,
        lambda one: f"* [`{one[1]}`](#pearl-{one[1]}): {' '.join(first[one[1]].split())}",
        text,
        flags=re.MULTILINE,
    )
    return CLI_NOTE + text.rstrip() + "\n"


def pages() -> dict[Path, str]:
    """Return the pages that this module writes, with their present text."""
    found = {DOCS / "cli.md": cli_page()}
    for name, algorithm in ALGORITHMS.items():
        page = DOCS / "algorithms" / f"{name.lower()}.md"
        found[page] = with_settings(page.read_text(encoding="utf-8"), name, algorithm)
    return found


def main() -> None:
    """Write all pages that differ."""
    for page, text in pages().items():
        if not page.exists() or page.read_text(encoding="utf-8") != text:
            page.write_text(text, encoding="utf-8")
            print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
