"""Write the results of ``make demo`` into the documentation: ``python docs/demo_figure.py out/demo/results.json``.

It replaces the table between the two ``demo`` comments of README.md and docs/index.md, and draws docs/images/demo/*.svg.
``make demo-figure`` runs the demo first.

The demo trains one run after the other, so its step times depend on what else the machine does meanwhile. The table has the
time of steps that take turns: the median over rounds of the ratio to the plain step of the same round. It is added to
the file of results, with the runs of each step of the loop, and measured again if that file is new.
"""

import argparse
import json
import pathlib
import re
import statistics
import sys
import time

ROOT = pathlib.Path(__file__).parents[1]
PAGES = ROOT / "README.md", ROOT / "docs" / "index.md"
IMAGES = ROOT / "docs" / "images" / "demo"
MARKED = re.compile(r"(?<=<!-- demo: written by docs/demo_figure.py -->\n).*?(?=<!-- demo: end -->)", re.S)
# The names of the demo's runs, as the argument of `statetx.scan` that makes the difference.
LABELS = {"plain": "None", "nested": "Levels(2)", "scheduled": "Slots({slots})"}
STYLES = {
    "light": {"text": "#1d2b30", "faint": "#5b6b71", "plain": "#b85c12", "nested": "#0e7386", "scheduled": "#0e7386"},
    "dark": {"text": "#e6edf0", "faint": "#a3b3b9", "plain": "#f0a35e", "nested": "#6cc7d3", "scheduled": "#6cc7d3"},
}


def show_memory(run):
    """Return the temporary memory of a run: four digits above 1 MiB, three below."""
    mib = run["temporary_mib"]
    return f"{mib:.1f} MiB" if mib >= 100 else f"{mib:.3f} MiB"


def load_demo(results):
    """Return the demo as a module, its options in a file of results, its text as integers, and the size of the vocabulary."""
    sys.path.insert(0, str(ROOT / "examples"))
    import train_long_sequence as demo

    options = demo.make_options().parse_args([])
    vars(options).update(results["options"])
    return demo, options, *demo.load_text(None, options.seq)


def measure_memory(results, name):
    """Return the bytes that XLA reserves for a step of a run, compiled at the sizes of a file of results and not run."""
    demo, options, _, vocabulary = load_demo(results)
    return demo.build(demo.strategies(options)[name], vocabulary, options)[2]


def count_step_runs(results):
    """Return how often a gradient runs each step of the loop ahead, in each run: once where nothing is recomputed."""
    demo, options, *_ = load_demo(results)
    strategies = demo.strategies(options).items()
    return {name: 1.0 if how is None else how.num_runs(options.seq) / options.seq for name, how in strategies}


def time_in_turns(results, rounds=9):
    """Return the time of a step of each run, relative to the plain one: medians over rounds."""
    demo, options, ids, vocabulary = load_demo(results)
    steps = {name: demo.build(c, vocabulary, options)[0] for name, c in demo.strategies(options).items()}
    window = next(demo.sample_windows(ids, options))
    seconds = {name: [] for name in steps}
    for _ in range(1 + rounds):  # the first one compiles
        for name, step in steps.items():
            start = time.perf_counter()
            float(step(window))
            seconds[name].append(time.perf_counter() - start)
    return {
        name: statistics.median(s / p for s, p in list(zip(own, seconds["plain"], strict=True))[1:])
        for name, own in seconds.items()
    }


def rows_of(results):
    """Return a row for each run: its name, argument, memory, fraction of the plain memory, runs of a step, and relative time."""
    for name, run in results["runs"].items():
        ratio = results["comparisons"].get(name, {"memory_ratio": 1})
        slots = re.search(r"\d+", run["checkpoint"])
        label = LABELS[name].format(slots=slots and slots[0])
        share = "1" if name == "plain" else f"1/{ratio['memory_ratio']:.0f}"
        runs, seconds = (f"{results[key][name]:.2f}" for key in ("step_runs", "time"))
        yield name, label, show_memory(run), share, runs, seconds


def make_table(results):
    """Return the Markdown table of the runs, with a sentence on how far they differ."""
    options = results["options"]
    exact = results["comparisons"]["scheduled"]
    if exact["loss_difference"] or exact["weight_difference"]:
        raise ValueError("the scheduled run no longer has the losses and weights of the plain one")
    slots = next(label for name, label, *_ in rows_of(results) if name == "scheduled")
    lines = [
        "| `checkpoint=` | temporary memory | fraction | runs of a step | time |",
        "|---|--:|--:|--:|--:|",
    ]
    for name, label, memory, share, runs, seconds in rows_of(results):
        memory, share = (memory, share) if name == "plain" else (f"**{memory}**", f"**{share}**")
        lines.append(f"| `{label}` | {memory} | {share} | {runs} | {seconds} |")
    model = f"{options['cell'].upper()} of {options['hidden']} units, batch {options['batch']}, on a CPU"
    text = f"One training step of a recurrent model ({model}) whose gradient goes through {options['seq']:,} steps of a `statetx.scan`.\n"
    text += f"After {options['steps']} training steps with `{slots}`, all losses and weights are bit for bit those of the first row.\n"
    text += f'"Runs of a step" counts how often each of the {options["seq"]:,} steps is computed forward. Times (medians, training steps took turns) are relative to the first row.\n'
    return "\n".join([*lines, "", text])


def insert(page, table):
    """Return the text of a page with the table between its marks."""
    text, count = MARKED.subn(lambda _: table, page)
    if count != 1:
        raise ValueError(f"{count} pairs of demo comments, there must be one")
    return text


def draw(results, style, path):
    """Draw the temporary memory of the runs as bars on one linear axis."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "statetx", "font.family": "sans-serif"}
    colors, runs = STYLES[style], results["runs"]
    figure = Figure(figsize=(7, 2.7))
    axes = figure.add_axes((0.02, 0.02, 0.96, 0.82))
    largest = max(run["temporary_mib"] for run in runs.values())
    for place, (name, label, memory, share, _, seconds) in enumerate(rows_of(results)):
        mib = runs[name]["temporary_mib"]
        axes.barh(-place, max(mib, 0.004 * largest), height=0.42, color=colors[name])
        label = "without checkpointing" if name == "plain" else f"checkpoint={label}"
        axes.text(0, -place + 0.28, label, va="bottom", fontsize=12.5, color=colors["text"])
        numbers = memory if name == "plain" else f"{memory}, {share} of the memory, {seconds} × the time"
        inside = mib > largest / 2
        axes.text(
            (0.985 if inside else 0.015) * largest, -place - 0.02, numbers, fontsize=13, weight="bold", va="center",
            ha="right" if inside else "left", color=("white" if style == "light" else "#1d2b30") if inside else colors[name],
        )  # fmt: skip
    axes.set(xlim=(0, 1.01 * largest), ylim=(-len(runs) + 0.7, 0.75))
    axes.axis("off")
    title = f"Temporary memory of a training step, gradient through {results['options']['seq']:,} steps"
    figure.text(0.02, 0.92, title, fontsize=12.5, color=colors["faint"])
    figure.savefig(path, transparent=True, metadata={"Date": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=pathlib.Path)
    path = parser.parse_args().results
    results = json.loads(path.read_text())
    for key, measure in ("step_runs", count_step_runs), ("time", time_in_turns):
        if key not in results:
            results[key] = measure(results)
            path.write_text(json.dumps(results, indent=2))
    for page in PAGES:
        page.write_text(insert(page.read_text(), make_table(results)))
    IMAGES.mkdir(exist_ok=True)
    for style, name in ("light", "memory.svg"), ("dark", "memory-dark.svg"):
        draw(results, style, IMAGES / name)


if __name__ == "__main__":
    main()
