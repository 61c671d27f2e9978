"""Messages: the printed form of objects, and suggestions for misspelled names."""

import copy
import functools
import pickle
import re
import traceback

import brainstate  # noqa: F401
import jax
import jax.numpy as jnp
import optax
import pytest

import statetx
from statetx import Param, State, policies

W = Param(jnp.ones((2, 3)), name="w")


class Layer:
    def __init__(self):
        self.weight, self.count = Param(jnp.ones(2)), State(jnp.zeros(2))

    @statetx.remat(policy="dots")
    def step(self, x):
        return x * self.weight.value


def f(x):
    return x


@pytest.mark.parametrize(
    "obj, text",
    [
        (State({"a": jnp.ones(2), "b": 1.5}), "State({'a': f32[2], 'b': float})"),
        (State([jnp.ones(2)] * 40), "State(list of 40 leaves)"),
        (Layer.step, "statetx.remat(Layer.step, policy='dots')"),
        (statetx.remat(functools.partial(f)), "statetx.remat(f)"),
        (statetx.remat(f, states=False, fence=None), "statetx.remat(f, fence=None, states=False)"),
        (
            statetx.jit(f, donate_states=True, static_argnums=0),
            "statetx.jit(f, static_argnums=0, donate_states=True)",
        ),
        (statetx.grad(f, wrt=Param), "statetx.grad(f, wrt=Param)"),
        (statetx.value_and_grad(f, wrt=[W]), "statetx.value_and_grad(f, wrt=[Param(f32[2,3], name='w')])"),
        (statetx.vmap(f, states={Param: 0}), "statetx.vmap(f, states={Param: 0})"),
        (statetx.jacrev(f, argnums=1), "statetx.jacrev(f, argnums=1)"),
        (statetx.functionalize(f), "statetx.functionalize(f)"),
        (statetx.trace_states(f), "statetx.trace_states(f)"),
        (policies.states(statetx.Not(Param)), "states(Not(Param))"),
    ],
)
def test_repr(obj, text):
    assert repr(obj) == text


def test_states_table_shortens_long_values():
    memory = State(optax.adam(0.1).init({f"layer{i}": jnp.ones(2) for i in range(8)}), name="memory")
    table = str(statetx.trace_states(lambda: memory.value)())
    assert "tuple of 17 leaves" in table and max(map(len, table.split("\n"))) < 100


def loss(x):
    return (W.value.sum() * x).sum()


def layer_loss(layer, x):
    return (layer.weight.value * x).sum()


@pytest.mark.parametrize(
    "call, error, meant",
    [
        (lambda: policies.names("h", missing="warning"), statetx.PolicyError, "warn"),
        (lambda: policies.offload("h", otherwise="saved"), statetx.PolicyError, "save"),
        (lambda: statetx.jit(layer_loss, donate_argnames="laier"), statetx.StaticArgumentError, "layer"),
        (lambda: statetx.grad(layer_loss, wrt="layer.wieght")(Layer(), 1.0), statetx.StateFilterError, "layer.weight"),
        (
            lambda: statetx.functionalize(layer_loss)({"weight": 1.0}, Layer(), 1.0),
            statetx.StateAccessError,
            "layer.weight",
        ),
    ],
)
def test_nearest_name_is_suggested(call, error, meant):
    with pytest.raises(error, match=re.escape(f"Did you mean {meant!r}?")):
        call()


@pytest.mark.parametrize("transform", ["scan", "vmap"])
def test_path_that_selects_no_state_raises(transform):
    layer = Layer()

    def run(states):
        if transform == "scan":
            return statetx.scan(lambda c, x: (c, layer.count.value * x), None, jnp.ones(2), states=states)
        return statetx.vmap(lambda x: layer.count.value * x, states=states)(jnp.ones(2))

    with pytest.raises(
        statetx.StateFilterError,
        match=r"states=\{'layer.cuont': ...\}: the path 'layer.cuont' selects no state.*'layer.count'\?",
    ):
        run({"layer.cuont": 0})
    run({"layer.c*": 0})
    run({State: 0, "layer.count": 0, Param: 0})  # shadowed by a type; a type need not occur


def test_donated_arguments_are_named_in_errors():
    with pytest.raises(statetx.StaticArgumentError, match=r"^donate_argnums=3 is out of range"):
        statetx.jit(f, donate_argnums=3)
    with pytest.raises(statetx.StaticArgumentError, match=r"^donate_argnames='laier'"):
        statetx.jit(layer_loss, donate_argnames="laier")
    with pytest.raises(
        statetx.StaticArgumentError, match=r"parameters \(\)\. .* as you call it: it takes none by position"
    ):
        statetx.jit(lambda: 0.0, donate_argnums=0)


def test_errors_end_with_their_address():
    """Users' own errors have the address of the public error that they derive from; a message that is used again has
    one.
    """

    class OwnError(statetx.PlanError):
        pass

    error = OwnError("too small", 7)
    assert str(error) == "too small\nSee https://statetx.readthedocs.io/en/latest/errors/#planerror"
    assert str(statetx.GradientError(str(error))) == str(error)
    assert str(statetx.PolicyWarning("odd")).endswith(
        "\nSee https://statetx.readthedocs.io/en/latest/errors/#policywarning"
    )
    assert issubclass(statetx.PolicyWarning, UserWarning)
    assert str(statetx.StatetxError("")).startswith("See https://")


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))])
def test_errors_are_copied_whole(duplicate):
    error = statetx.PlanError("too small", 7)
    other = duplicate(error)
    assert type(other) is statetx.PlanError and other.args == ("too small",)
    assert str(other) == str(error) and other.smallest_bytes == 7


def test_chained_errors_have_an_address_each():
    try:
        try:
            statetx.remat(f, policy="dot")
        except statetx.PolicyError as e:
            raise statetx.StateFilterError("no state") from e
    except statetx.StateFilterError as e:
        lines = "".join(traceback.format_exception(e)).split("\n")
    addresses = [line.rpartition("#")[2] for line in lines if line.startswith("See ")]
    assert addresses == ["policyerror", "statefiltererror"]


class Hostile:
    __slots__ = ()

    def __getattr__(self, name):
        raise RuntimeError(f"asked for {name}")


class Key:
    def __repr__(self):
        raise RuntimeError("asked for its repr")


def test_name_of_a_state_is_found_without_running_the_users_code():
    hostile, table, items = Hostile(), {Key(): 1}, list(range(10))
    layers = [statetx.State(jnp.ones(2))]
    with pytest.raises(statetx.StateValueError, match=r"Write layers\[0\].value"):
        layers[0] + 1
    assert hostile is not None and len(table) + len(items) == 11
    assert not hasattr(layers[0], "shape")
    for state, name in ((statetx.State(X, name="total"), "total"), (statetx.State(X), "state")):
        with pytest.raises(statetx.StateValueError, match=f"Write {name}.value"):
            (lambda make: make() + 1)(lambda state=state: state)  # no variable of the caller has it


def test_note_of_a_replaced_state_is_added_once():
    model = type("Model", (), {})()
    model.w = jnp.ones(3)
    with pytest.raises(AttributeError) as caught:
        statetx.jit(statetx.grad(statetx.remat(lambda x: (model.w.value * x).sum())))(1.0)
    notes = [note for note in caught.value.__notes__ if ".value" in note]
    assert len(notes) == 1


def test_fix_names_the_argument_of_this_error_and_not_of_one_that_was_caught():
    @statetx.jit
    def f(a, b):
        try:
            bool(a > 0)
        except jax.errors.TracerBoolConversionError:
            pass
        return float(b)

    with pytest.raises(jax.errors.ConcretizationTypeError) as caught:
        f(1.0, 2.0)
    notes = "\n".join(caught.value.__notes__)
    assert "static_argnames='b'" in notes and "'a'" not in notes


def test_a_plan_given_to_jax_checkpoint_says_what_to_use():
    with pytest.raises(statetx.PolicyError, match=r"Fix: statetx.remat\(f, policy="):
        jax.grad(jax.checkpoint(jnp.sin, policy=statetx.remat(jnp.sin, policy="fit:1GiB")._policy))(1.0)


def test_beginning_of_a_name_is_completed():
    with pytest.raises(statetx.PlanError, match=r"Did you mean 'temporaries'\?"):
        statetx.plan(lambda x: (x**2).sum(), jnp.ones(3), budget=100, of="temp")


# -- names with characters that a terminal obeys

X = jnp.ones(4)
ESCAPE, OVERRIDE = "\x1b[31m", "\u202e"


def shown_with(name):
    """What reports and errors show of a state and a function of this name."""
    states = {name: Param(X)}

    def f(x):
        return jnp.sin(states[name].value * jnp.sin(x)).sum()

    f.__name__ = f.__qualname__ = name
    reports = {
        "trace_states": statetx.trace_states(f)(X),
        "saved_residuals": statetx.saved_residuals(f, X),
        "print_fwd_bwd": statetx.print_fwd_bwd(f, X),
        "memory_profile": statetx.memory_profile(f, X),
        "memory_report": statetx.memory_report(f, X),
    }
    for report, value in reports.items():
        yield report, str(value)
        yield report, repr(value)
        yield report, value._repr_html_()
    variables = {"statetx": statetx, "X": X}
    code = "state = statetx.State(X)\ndef g(carry, x):\n    state.value = X[:1]\n    return carry, x"
    exec(compile(code, f"{name}.py", "exec"), variables)
    try:
        statetx.scan(variables["g"], X, None, 2)
    except statetx.CarryTypeError as e:
        yield "files of a state and of a function", str(e)
    yield "repr", repr(State(X, name=name))
    try:
        statetx.grad(f, wrt="typo")(X)
    except statetx.StateFilterError as e:
        yield "error", str(e)


@pytest.mark.parametrize("character", [ESCAPE, OVERRIDE, "\x9b", "\x07"])
def test_names_reach_terminals_and_notebooks_without_control_characters(character, capsys):
    texts = [*shown_with(f"a{character}b"), ("printed", capsys.readouterr().out)]
    assert len(texts) > 15
    for source, text in texts:
        assert all(c.isprintable() or c == "\n" for c in text), (source, text)
    assert sum("a\\" in text for _, text in texts) > 8  # the name is there


def test_long_name_in_a_notebook_keeps_its_start_and_end():
    name = f"start{'x' * 400}end"
    states = {name: Param(X)}
    html = statetx.trace_states(lambda: states[name].value)()._repr_html_()
    (text,) = re.findall(r"<code>([^<]*start[^<]*)</code>", html)
    assert len(text) == 80 and "start" in text and "…" in text and text.endswith("end")
    assert f'{name}"' in html  # under the pointer


@pytest.mark.parametrize("key", ["gnp.exe", "a[b]", "it's"])
def test_residual_of_a_weight_in_a_dict_is_listed_with_the_dict(key):
    def loss(w, x):
        return jnp.tanh(jnp.tanh(x @ w[key]) @ w[key]).sum()

    profile = statetx.memory_profile(loss, {key: jnp.ones((8, 8))}, jnp.ones((64, 8)))
    owners = re.findall(r"%  residual +(\S+) ", str(profile))
    assert owners and set(owners) == {"w"}
