"""`autopipe plan --measure-cores`: which threads and cores suit each stage of a plan on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autopipe.core.plan import Plan
    from autopipe.profile.split import SplitChoice

_PROMPTS = "chat:3"


def measure(plan: Plan) -> SplitChoice:
    """Run the plan with every split of the cores; raises what `choose_split` raises."""
    from rich.console import Console

    from autopipe.bench.encode import encode_prompt, load_tokenizer
    from autopipe.bench.prompts import Prompt, load_prompts
    from autopipe.profile.split import choose_split

    tokenizer = load_tokenizer(plan)
    prompts = []
    for prompt in load_prompts(_PROMPTS):
        if not getattr(tokenizer, "chat_template", None) and prompt.messages is not None:
            prompt = Prompt(prompt.name, text=str(prompt.messages[-1]["content"]))
        prompts.append(encode_prompt(prompt, tokenizer))
    console = Console(stderr=True)
    with console.status("measuring splits of the cores") as status:
        return choose_split(plan, prompts, advance=lambda label: status.update(f"measuring {label}"))


def show_cores(choice: SplitChoice) -> None:
    """A table of the splits on stdout, the fastest first."""
    from rich.table import Table

    from autopipe.cli.show import console

    table = Table("split of the cores", "ms/token", title="Measured here")
    for label, value in sorted(choice.ms_per_token.items(), key=lambda item: item[1]):
        table.add_row(f"{label} (chosen)" if label == choice.label else label, f"{value:.2f}")
    console().print(table)
