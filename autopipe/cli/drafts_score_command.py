"""`autopipe drafts score`: what each drafter of a chain is worth, and which chain the figures favour."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopipe.cli import arguments as arg

if TYPE_CHECKING:
    from autopipe.drafts.score import Score

_HELP = """Score drafters with full information.

The target answers the prompts once; one pass of each drafter over these answers tells at every position whether it
agrees. Printed: agreement per drafter and per pair, tokens per verification by window, the cost of a token, and the
chains of one or two of the drafters in the order of their simulated speed.

`--out` is a profile like that of `autopipe profile`, from fewer repeats: its agreement tables serve the simulator
(`autopipe simulate --profile`).

Examples:

- `autopipe drafts score --prompts chat:8`
- `autopipe drafts score --prompts mine.jsonl --drafter ngram --drafter small --target big --json`
"""

_REPEATS = 2
_CONTEXTS = (64, 384)
_VERIFY_TOKENS = (1, 2, 3, 4, 6, 8, 12, 16)
_SHOWN_CHAINS = 8


def score(
    prompts: arg.ProfilePrompts = None,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Where the tables go.")] = Path("score.json"),
    max_new_tokens: arg.LongestOutput = 128,
    plan: arg.PlanFile = None,
    target: arg.Target = None,
    drafter: arg.Drafters = None,
    backend: arg.Backend = None,
    dtype: arg.Dtype = None,
    device: arg.Device = None,
    adapter: arg.Adapter = None,
    trust_remote_code: arg.TrustRemoteCode = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    from autopipe.cli.exits import orderly_exit

    with orderly_exit():
        from autopipe.cli.options import PlanOptions, build_plan, naming_options
        from autopipe.cli.profile_command import DEFAULT_PROMPTS, progress
        from autopipe.cli.run_command import say
        from autopipe.core.affinity import usable_cores
        from autopipe.core.errors import ConfigError
        from autopipe.inputs import require_writable

        if max_new_tokens < 2:
            raise ConfigError("--max-new-tokens", max_new_tokens, "2 or more")
        require_writable(out, "--out")
        options = PlanOptions(
            plan=plan,
            target=target,
            drafters=drafter or (),
            backend=backend,
            dtype=dtype,
            device=device,
            adapter=adapter,
            trust_remote_code=trust_remote_code,
        )
        built = build_plan(options)
        if not built.drafters:
            raise ConfigError("--drafter", "none", "at least one drafter to score")

        from autopipe.bench.workload import encode_workload, read_workload
        from autopipe.core.preflight import inspect_plan
        from autopipe.drafts.score import score as read_score
        from autopipe.profile import profile_plan

        sets = tuple(prompts or DEFAULT_PROMPTS)
        chosen = read_workload(sets, "--prompts")
        with naming_options(options, built):
            info = inspect_plan(built, progress=say)
        with progress() as advance:
            found = profile_plan(
                built,
                encode_workload(chosen, built),
                out,
                prompt_sets=sets,
                eos_token_ids=info.eos_token_ids,
                threads=tuple(dict.fromkeys((max(1, usable_cores() // 2), usable_cores()))),
                contexts=_CONTEXTS,
                verify_tokens=_VERIFY_TOKENS,
                repeats=_REPEATS,
                max_new_tokens=max_new_tokens,
                advance=advance,
            )
            result = read_score(found, built)
        if json_output:
            print(json.dumps({"out": str(out), **result.to_dict()}))
        else:
            show(result, out)


def register(app: typer.Typer) -> None:
    """Add the command to `autopipe drafts`."""
    app.command(name="score", help=_HELP)(score)


def show(result: Score, out: Path) -> None:
    """Tables on stdout."""
    from rich.table import Table

    from autopipe.cli.show import console, number

    kinds = list(result.drafters[0].agreement)
    windows = list(result.drafters[0].acceptance_length)
    table = Table(title="Drafters: agreement, tokens per verification by window, cost")
    for heading in ("drafter", *kinds, *(f"w={window}" for window in windows), "ms/token", "of a target step"):
        table.add_column(heading, justify="left" if heading == "drafter" else "right")
    for each in result.drafters:
        table.add_row(
            each.name,
            *(number(each.agreement[kind]) for kind in kinds),
            *(number(each.acceptance_length[window]) for window in windows),
            number(1e3 * each.cost_s, 3),
            f"{each.relative_cost:.1%}",
        )
    chains = Table(title="Chains, simulated")
    for heading in ("chain", "over plain", "tokens/verify"):
        chains.add_column(heading, justify="left" if heading == "chain" else "right")
    for chain in result.chains[:_SHOWN_CHAINS]:
        chains.add_row(chain.words, number(chain.speedup, unit="x"), number(chain.acceptance_length))
    output = console()
    output.print(table)
    for (first, second), rate in result.pairs.items():
        output.print(f"{first} and {second} pick the same token at {rate:.1%} of positions")
    output.print(chains)
    output.print(f"Best: {result.chains[0].words}. Tables for the simulator: {out}", markup=False)
