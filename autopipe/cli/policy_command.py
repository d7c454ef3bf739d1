"""`autopipe policy`: train, evaluate, export and inspect the policies that reconfigure a pipeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

HELP = """Policies: what reconfigures the pipeline while it runs.

`rules`, `bandit`, `planner` (Optuna at run time) and `rl` (a trained network) all choose plans from what the pipeline
measures. Here they are compared, and the network is trained.
"""

_TRAIN_HELP = """Train the `rl` policy in the simulator.

Episodes are drawn from the scenarios, each with other latencies, agreement, contention and load, and from machines
drawn at random. OUT gets a checkpoint, TensorBoard logs (`tensorboard --logdir OUT/tb`), a learning curve and, in
`OUT/policy`, the policy. `--resume` goes on with the run in OUT, for instance up to more `--timesteps`.

Examples:

- `autopipe policy train --out run --timesteps 400000 --seed 1`
- `autopipe policy train --out run --timesteps 800000 --resume`
- `autopipe policy train --out mine --scenarios mine.yaml --random-share 0 --envs 4`
"""

_EVAL_HELP = """Compare policies with the oracle, with plain decoding and with the best static plan.

Every policy plays every scenario under every seed in the simulator, behind the safety layer. `oracle`, the best
`static` plan (chosen with hindsight) and `off` are always among them. A folder from `policy export` counts as a
policy; `bandit:thompson` is the bandit with Thompson sampling.

Examples:

- `autopipe policy eval --policies rules,bandit,planner,rl --scenarios heldout --seeds 20 --jobs 2`
- `autopipe policy eval --policies bandit --scenarios alternating,drift --seeds 5 --plot bandit.png`
- `autopipe policy eval --policies run/policy --scenarios mine.yaml --json`
- `autopipe policy eval --live --policies bandit` (the real engine, on the default model; minutes)
"""

app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown", help=HELP)


@app.command(help=_TRAIN_HELP)
def train(
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where the run is kept.")],
    timesteps: Annotated[int, typer.Option("--timesteps", metavar="N", help="Control intervals of PPO.")] = 400_000,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of everything random.")] = 0,
    envs: Annotated[int, typer.Option("--envs", metavar="N", help="Simulated machines side by side.")] = 8,
    algorithm: Annotated[
        str, typer.Option("--algorithm", metavar="NAME", help="`maskable-ppo`, `ppo` or `recurrent-ppo`.")
    ] = "maskable-ppo",
    imitation_steps: Annotated[
        int, typer.Option("--imitation-steps", metavar="N", help="Control intervals of imitation first; 0: none.")
    ] = 120_000,
    scenarios: Annotated[
        str,
        typer.Option("--scenarios", "--scenario", metavar="NAMES", help="Shipped names or files, separated by commas."),
    ] = "shipped",
    random_share: Annotated[
        float, typer.Option("--random-share", metavar="SHARE", help="Share of episodes on machines drawn at random.")
    ] = 0.5,
    learning_rate: Annotated[float, typer.Option("--learning-rate", metavar="RATE", help="Of PPO.")] = 1.5e-4,
    eval_every: Annotated[
        int, typer.Option("--eval-every", metavar="N", help="Timesteps between evaluations and checkpoints.")
    ] = 25_000,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in OUT.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
) -> None:
    from autopipe.cli.exits import orderly_exit

    with orderly_exit():
        from autopipe.cli.show import console
        from autopipe.core.errors import ConfigError
        from autopipe.envs.scenario import load_scenario, scenario_names
        from autopipe.policies.learning_curve import plot_learning_curve
        from autopipe.policies.rl_checkpoint import read_config
        from autopipe.policies.rl_train import TrainConfig
        from autopipe.policies.rl_train import train as run

        names = scenario_names() if scenarios == "shipped" else scenarios.split(",")
        for name in names:
            try:
                load_scenario(name)
            except ConfigError as error:
                raise ConfigError("--scenarios", error.value, error.allowed) from None
        if resume:
            config = read_config(out)[0].replace(timesteps=timesteps, eval_every=eval_every)
        else:
            config = TrainConfig.parse(
                {
                    "algorithm": algorithm,
                    "timesteps": timesteps,
                    "seed": seed,
                    "envs": envs,
                    "imitation_steps": imitation_steps,
                    "scenarios": names,
                    "random_share": random_share,
                    "learning_rate": learning_rate,
                    "eval_every": eval_every,
                },
                prefix="--",
            )
        screen = console(stderr=True)
        result = run(config, out, resume=resume, say=lambda text: screen.print(text, highlight=False))
        curve = plot_learning_curve(out, out / "learning-curve.png")
        if json_output:
            typer.echo(json.dumps({**result, "policy": str(out / "policy"), "curve": str(curve)}))
        else:
            screen.print(f"policy: {out / 'policy'}; learning curve: {curve}", highlight=False)


@app.command(name="eval", help=_EVAL_HELP)
def evaluate(
    policies: Annotated[
        str, typer.Option("--policies", metavar="NAMES", help="Separated by commas; a folder is a trained policy.")
    ] = "rules,bandit,planner,rl",
    scenarios: Annotated[
        str,
        typer.Option(
            "--scenarios",
            "--scenario",
            metavar="NAMES",
            help="`heldout`, `shipped`, names or files, separated by commas.",
        ),
    ] = "heldout",
    seeds: Annotated[int, typer.Option("--seeds", metavar="N", help="Episodes of every policy and scenario.")] = 20,
    jobs: Annotated[int, typer.Option("--jobs", metavar="N", help="Processes side by side.")] = 1,
    cells: Annotated[
        Path | None,
        typer.Option("--cells", metavar="FILE", help="Keep episodes here, and do not play again what is in it."),
    ] = None,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Also a picture (png, svg, pdf).")] = None,
    live: Annotated[bool, typer.Option("--live", help="On the real engine instead: code, chat, summaries.")] = False,
    plan: Annotated[
        Path | None, typer.Option("--plan", metavar="FILE", help="With --live: the plan whose drafters are the menu.")
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", metavar="N", help="With --live: rounds of the stream.")] = 2,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    from autopipe.cli.exits import orderly_exit

    with orderly_exit():
        names = [name for name in policies.split(",") if name]
        if live:
            from autopipe.cli.policy_live import run_live

            run_live(names, plan=plan, rounds=rounds, json_output=json_output)
            return
        from autopipe.policies.evaluation import evaluate as play
        from autopipe.policies.evaluation_scenarios import find_scenarios
        from autopipe.policies.summary import make_rows

        chosen = find_scenarios(scenarios)
        with _progress(json_output) as say:
            found = play(chosen, names, seeds, jobs=jobs, cells_file=cells, say=say)
        rows = make_rows(found)
        if plot is not None:
            from autopipe.policies.eval_plot import plot_evaluation

            plot_evaluation(rows, plot)
        if json_output:
            typer.echo(json.dumps({"rows": [row.to_dict() for row in rows]}))
        else:
            from autopipe.cli.policy_tables import show_rows

            show_rows(rows, chosen)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A folder of `policy train`.")],
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where the policy goes.")],
) -> None:
    """Write the network of a run's last checkpoint: safetensors and JSON, read without what trained it."""
    from autopipe.cli.exits import orderly_exit

    with orderly_exit():
        from autopipe.policies.imitation import Lessons
        from autopipe.policies.rl_checkpoint import load_checkpoint, read_config
        from autopipe.policies.rl_train import export as write
        from autopipe.policies.rl_train import make_model

        config, timesteps = read_config(run)
        model = make_model(config, Lessons.none(config.env))
        load_checkpoint(run, model, config)
        write(model, config, out, timesteps)
        typer.echo(f"{out}: {timesteps} timesteps of {config.algorithm}")


@app.command()
def inspect(
    policy: Annotated[
        Path | None, typer.Argument(metavar="[FOLDER]", help="An exported policy; default: the one that ships.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """What a trained policy is: spaces, network, what it was trained on; and whether the file is whole."""
    from autopipe.cli.exits import orderly_exit

    with orderly_exit():
        from autopipe.policies.rl_format import WEIGHTS, load_policy
        from autopipe.policies.rl_policy import SHIPPED

        folder = SHIPPED if policy is None else policy
        saved = load_policy(folder, "FOLDER")
        facts: dict[str, Any] = {
            "folder": str(folder),
            **saved.header.model_dump(mode="json"),
            "parameters": sum(tensor.numel() for tensor in saved.tensors.values()),
            "bytes": (folder / WEIGHTS).stat().st_size,
        }
        if json_output:
            typer.echo(json.dumps(facts))
        else:
            from autopipe.cli.policy_tables import show_facts

            show_facts(facts)


class _progress:
    """A progress bar of cells on stderr; quiet for JSON."""

    def __init__(self, quiet: bool) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        from autopipe.cli.show import console

        columns = (TextColumn("episodes"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console(stderr=True), transient=True, disable=quiet)

    def __enter__(self) -> Any:
        self._bar.start()
        task = self._bar.add_task("episodes", total=None)
        return lambda done, total: self._bar.update(task, completed=done, total=total)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def register(root: typer.Typer) -> None:
    """Add the commands to the application."""
    root.add_typer(app, name="policy")
