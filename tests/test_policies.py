"""Policies: values, their algebra, the residuals that they select, and their errors."""

import collections
import dataclasses
import itertools
import pickle
import warnings

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
import pytest

import statetx
from helpers import REMAT3, equations
from statetx import _jax, policies
from statetx._remat import decide
from statetx._remat.atoms import Everything
from statetx._remat.override import override, rewritten_by
from statetx._remat.policy import Action, Value, Verdict
from statetx._remat.rewriter import Rewriter
from statetx._remat.survey import Survey
from statetx._targets import current
from statetx._text import parse_bytes

A, B, OFF = policies.names("a"), policies.names("b"), policies.offload("a")

# -- values --------------------------------------------------------------------------------------------------------

SHOWN = {
    "everything": policies.everything,
    "nothing": policies.nothing,
    "dots": policies.dots,
    "dots_without_batch_dims": policies.dots_without_batch_dims,
    "names('a', 'b')": policies.names("b", "a"),
    "names('a', missing='warn')": policies.names("a", missing="warn"),
    "except_names('a')": policies.except_names("a"),
    "offload('a')": policies.offload("a"),
    "offload(dots, dst='host', otherwise='save')": policies.offload(policies.dots, dst="host", otherwise="save"),
    "larger_than(1536)": policies.larger_than("1.5KiB"),
    "smaller_than(64)": policies.smaller_than(64),
    "primitives('exp', 'tanh')": policies.primitives("tanh", "exp"),
    "path('blocks.3.*')": policies.path("blocks.3.*"),
    "states(Param)": policies.states(statetx.Param),
    "names('a') | names('b') & ~dots": A | (B & ~policies.dots),
    "(names('a') | names('b')) & dots": (A | B) & policies.dots,
    "names('a') | (names('b') | dots)": A | (B | policies.dots),
    "~(names('a') & names('b'))": ~(A & B),
    "(names('a') | dots).then(names('b'))": (A | policies.dots).then(B),
}


@pytest.mark.parametrize("text", SHOWN)
def test_repr_and_equality(text):
    policy = SHOWN[text]
    assert repr(policy) == text
    again = pickle.loads(pickle.dumps(policy))
    assert again == policy and hash(again) == hash(policy)
    others = [p for t, p in SHOWN.items() if t != text]
    assert policy not in others
    scope = {**vars(policies), "Param": statetx.Param}
    assert eval(text, scope) == policy
    with pytest.raises((dataclasses.FrozenInstanceError, AttributeError)):
        policy.chosen = frozenset()


def test_sizes():
    assert parse_bytes("2GB") == 2 * 10**9 and parse_bytes("0.5 MiB") == 2**19
    assert parse_bytes(2**63 - 1) == 2**63 - 1 and parse_bytes("0") == 0
    digits = "9" * 4301  # Python prints and reads no more of an integer
    for wrong in ("2 parsecs", "MiB", "nan", "-1GiB", -1.5, True, None, 2**63, 10**5000, digits, f"{digits}GiB"):
        with pytest.raises(statetx.PolicyError, match=r"size") as info:
            parse_bytes(wrong)
        assert len(str(info.value)) < 400
    for strategy in (policies.Slots, policies.Levels, policies.Lengths):
        with pytest.raises(statetx.PolicyError, match=r"at least 1 and below 2\*\*63, got an integer of \d+ bits"):
            strategy(10**5000)


# -- the algebra ---------------------------------------------------------------------------------------------------


class Says(policies.Policy):
    """Says the same of every value."""

    def __init__(self, decision):
        self.decision = decision

    def judge(self, value):
        return Verdict(self.decision, *(("device", "pinned_host") if self.decision is Action.OFFLOAD else ()))


@pytest.mark.parametrize(("a", "b"), list(itertools.product(Action, Action)))
def test_algebra_and_precedence(a, b):
    save, offload, recompute = Action.SAVE, Action.OFFLOAD, Action.RECOMPUTE
    strength = {save: 2, offload: 1, recompute: 0}
    value = Value(jax.lax.sin_p, (), {}, jax.typeof(1.0))
    say = lambda policy: policy.judge(value).decision
    assert strength[say(Says(a) | Says(b))] == max(strength[a], strength[b])
    assert strength[say(Says(a) & Says(b))] == min(strength[a], strength[b])
    assert say(~Says(a)) == (save if a is recompute else recompute)
    assert say(Says(a).then(Says(b))) == (b if a is recompute else a)


def test_jax_policies_in_the_algebra():
    jax_dots = jax.checkpoint_policies.dots_saveable
    for policy in (A | jax_dots, jax_dots | A, A | "dots_saveable", A & jax_dots, A.then("dots")):
        assert isinstance(policy, policies.Policy)
    both = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["a"],
        names_which_can_be_offloaded=["b"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    kept = policies.nothing | both
    named = lambda name: Value(_jax.name_primitive, (), {"name": name}, jax.typeof(1.0), names=frozenset({name}))
    assert kept.judge(named("a")).decision is Action.SAVE
    assert kept.judge(named("b")) == (Action.OFFLOAD, "device", "pinned_host", "raise", None)
    assert kept.judge(named("c")).decision is Action.RECOMPUTE


# -- saved values --------------------------------------------------------------------------------------------------


class Block:
    """Every value has its own shape, which identifies it among the residuals."""

    def __init__(self):
        self.w = statetx.Param(jnp.linspace(-1.0, 1.0, 2 * 5).reshape(5, 2))
        self.v = statetx.Param(jnp.linspace(-0.5, 1.0, 5 * 7).reshape(7, 5))
        self.count = statetx.State(jnp.zeros((), jnp.int32))

    def __call__(self, x):  # float[3, 2]
        self.count.value += 1
        h = statetx.checkpoint_name(jnp.tanh(x @ self.w.value.T), "hidden")  # [3, 5]
        scores = jnp.einsum("ik,jk->ij", h, h)  # [3, 3]
        batched = jnp.einsum("ik,ikl->il", h, jnp.broadcast_to(self.v.value.T, (3, 5, 7)))  # [3, 7]
        out = statetx.checkpoint_name(jnp.exp(batched * 0.1), "out")
        wide = jnp.sin(jnp.tile(out, (1, 3)))  # [3, 21]
        return (wide**2).sum() + jnp.cos(scores).sum()


X = jnp.linspace(-1.0, 2.0, 6).reshape(3, 2)


def shapes(policy, run=lambda f, x: f(x), x=X):
    """Shapes of the arrays that the pullback holds only with the policy."""

    def held(policy):
        block = Block()
        f = statetx.remat(block, policy=policy)
        pure = statetx.functionalize(lambda x: run(f, x))
        _, pullback = jax.vjp(lambda values, x: pure(values, x)[0], pure.values(x), x)
        return collections.Counter(r.shape for r in jax.tree.leaves(pullback) if hasattr(r, "shape"))

    return sorted((held(policy) - held(None)).elements())


KEPT = {
    policies.dots: [(3, 3), (3, 5), (3, 7)],
    policies.dots_without_batch_dims: [(3, 3), (3, 5)],
    policies.names("hidden"): [(3, 5)],
    policies.names("hidden", "out"): [(3, 5), (3, 7)],
    policies.primitives("dot_general", "exp"): [(3, 3), (3, 5), (3, 7)],  # the operand of exp is not needed any more
    policies.primitives("sin"): [(3, 21)],
    policies.primitives("cos"): [],  # the derivative is computed from its operand
    policies.larger_than(3 * 7 * 4): [(3, 21), (3, 21)],
    policies.smaller_than(3 * 7 * 4): [(3, 3), (3, 5)],
    policies.path("v"): [(3, 7), (3, 21), (3, 21)],
    policies.states("w"): [(3, 5)],
    policies.states(statetx.Param): [(3, 5), (3, 7)],
    policies.names("hidden") | policies.larger_than(3 * 7 * 4): [(3, 5), (3, 21), (3, 21)],
    policies.dots & policies.path("w"): [(3, 3), (3, 5)],
    policies.dots & ~policies.dots_without_batch_dims: [(3, 7)],
    jax.checkpoint_policies.save_only_these_names("hidden"): [(3, 5)],
}


@pytest.mark.parametrize("policy", KEPT, ids=lambda p: repr(p).partition(" at 0x")[0])
def test_each_policy_saves_its_values(policy):
    kept = shapes(policy)
    expected = KEPT[policy]
    assert kept == sorted(expected)


@pytest.mark.slow
def test_except_names_drops_exactly_what_is_named():
    def f(x):
        x = statetx.checkpoint_name(jnp.tanh(jnp.sin(x)), "a")
        return jnp.exp(statetx.checkpoint_name(jnp.tanh(x), "b")).sum()

    def num_recomputed(policy):
        _, pullback = jax.vjp(statetx.remat(f, policy=policy), X)
        counts = collections.Counter(e.primitive.name for e in equations(jax.make_jaxpr(pullback)(1.0).jaxpr))
        return counts["tanh"], counts["sin"], counts["exp"]

    assert num_recomputed(policies.nothing) == (2, 1, 1)
    assert num_recomputed(policies.except_names("a")) == (1, 0, 0)
    assert num_recomputed(policies.except_names("a", "b")) == (2, 0, 0)
    theirs = jax.checkpoint_policies.save_anything_except_these_names("a")
    with pytest.warns(statetx.PolicyWarning, match="saves everything"):
        assert num_recomputed(theirs)[0] == 0  # JAX's saves it all the same


ALL = [
    *KEPT,
    policies.everything,
    policies.nothing,
    policies.except_names("out"),
    ~policies.dots,
    policies.offload("out"),
]


# The others take their time, behind the marker.
FAST = (policies.dots, policies.offload("out"))


@pytest.mark.parametrize(
    "policy", [pytest.param(p, marks=[] if p in FAST else pytest.mark.slow, id=repr(p)) for p in ALL]
)
def test_gradients_and_writes_equal_without_a_policy(policy):
    def results(wrap):
        block = Block()
        f = wrap(block)
        first = statetx.value_and_grad(f, 0, wrt={"w": block.w, "v": block.v})(X)
        second = statetx.jit(statetx.hessian(f))(X)
        looped = statetx.grad(lambda x: statetx.scan(lambda c, _: (c + f(c), f(c)), x, None, length=2)[1].sum())(X)
        return first, second, looped, block.count.value

    actual, expected = results(lambda f: statetx.remat(f, policy=policy)), results(lambda f: f)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), actual, expected)


def test_vmap_saves_the_residuals_of_the_unbatched_function():
    """JAX's policy for dots keeps none of them once vmap has given each a batch dimension; ours is judged as
    written.
    """

    def held(policy, is_mapped):
        block = Block()
        f = statetx.remat(block, policy=policy)
        pure = statetx.functionalize(f)
        values = pure.values(X)
        if is_mapped:
            run = lambda values, xs: jax.vmap(lambda x: pure(values, x)[0])(xs)
            _, pullback = jax.vjp(run, values, jnp.stack([X, X, X, X]))
        else:
            _, pullback = jax.vjp(lambda values, x: pure(values, x)[0], values, X)
        sizes = [r.size for r in jax.tree.leaves(pullback) if hasattr(r, "size")]
        return sorted(n // 4 if is_mapped and n % 4 == 0 and n != 4 else n for n in sizes)

    for policy in ALL:
        if isinstance(policy, policies.Policy) and not isinstance(policy, Everything):
            assert held(policy, True) == held(policy, False), policy
    theirs = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    assert held(theirs, True) != held(theirs, False)


def test_saved_value_is_not_recomputed():
    """JAX recomputes a tanh or exp whose result is named, and all before it: its derivative reads the unnamed
    result.
    """

    def f(x):
        return jnp.sin(statetx.checkpoint_name(jnp.exp(jnp.tanh(x @ x)), "kept")).sum()

    def num_backward(remat):
        _, pullback = jax.vjp(remat(f), jnp.eye(3))
        counts = collections.Counter(e.primitive.name for e in equations(jax.make_jaxpr(pullback)(1.0).jaxpr))
        return counts["dot_general"], counts["tanh"], counts["exp"]

    keep = jax.checkpoint_policies.save_only_these_names("kept")
    theirs = (2, 0, 0) if REMAT3 and not jax.__version__.startswith("0.10.") else (3, 1, 1)
    assert num_backward(lambda f: jax.checkpoint(f, policy=keep)) == theirs
    assert num_backward(lambda f: statetx.remat(f, policy=policies.names("kept"))) == (3, 1, 0)
    both = policies.names("kept") | policies.primitives("tanh")
    assert num_backward(lambda f: statetx.remat(f, policy=both)) == (2, 0, 0)


def body(x):
    return statetx.checkpoint_name(jnp.sin(x), "h") * 0.9


def for_loop(f, length):
    return lambda x: statetx.scan(lambda h, _: (f(h), None), x, length=length)[0]


LOOPS = {
    "scan": for_loop(body, 6),
    "scan in scan": for_loop(for_loop(body, 3), 5),
    "three scans": for_loop(for_loop(for_loop(body, 2), 3), 4),
    "scan in jit in scan": for_loop(lambda x: jax.jit(for_loop(body, 3))(x), 5),
    "scan in a branch in scan": for_loop(lambda x: jax.lax.cond(x[0] > -9, for_loop(body, 3), jnp.cos, x), 5),
    "fori_loop": lambda x: statetx.fori_loop(0, 7, lambda i, h: body(h), x),
    "scan of vmap": for_loop(statetx.vmap(body), 6),
    "unrolled": lambda x: statetx.scan(lambda h, _: (body(h), None), x, length=6, unroll=3)[0],
}


@pytest.mark.sample
@pytest.mark.filterwarnings("ignore::statetx.PolicyWarning")  # of the limit that selects nothing
@pytest.mark.parametrize("loop", LOOPS)
def test_bytes_of_a_value_are_those_that_saving_it_takes(loop):
    def held(policy):
        """The bytes that a pullback holds."""
        _, pullback = jax.vjp(statetx.remat(lambda x: LOOPS[loop](x).sum(), policy=policy), jnp.linspace(0.1, 1, 64))
        return sum(x.nbytes for x in jax.tree.leaves(pullback) if x.size >= 64)

    survey = Survey(jax.make_jaxpr(LOOPS[loop])(jnp.ones(64)).jaxpr)
    (value,) = [s.value for s in survey.sites if "h" in s.value.names]
    assert value.nbytes == held(policies.names("h")) - held(None) > 64 * 4
    for limit, is_saved in ((value.nbytes, False), (value.nbytes + 1, True)):
        policy = policies.names("h") & policies.smaller_than(limit)
        assert held(policy) - held(None) == value.nbytes * is_saved


def test_values_inside_loops_branches_and_jitted_functions():
    @jax.jit
    def inner(x):
        return statetx.checkpoint_name(jnp.tanh(x), "in jit")

    def f(x):
        def step(h, _):
            h = statetx.checkpoint_name(jnp.sin(inner(h)), "step")
            return h, None

        h, _ = jax.lax.scan(step, x, None, length=6)
        h = jax.lax.cond(x[0] > 0, lambda h: statetx.checkpoint_name(jnp.exp(h), "branch"), jnp.sin, h)
        return (h**2).sum()

    def held(policy):
        _, pullback = jax.vjp(statetx.remat(f, policy=policy), jnp.ones(4))
        return sorted(r.shape for r in jax.tree.leaves(pullback) if r.size > 1)

    assert held(None) == [(4,)]
    assert (6, 4) in held(policies.names("step")) and (6, 4) in held(policies.names("in jit"))
    assert held(policies.names("branch")).count((4,)) == 2
    found = {name: v for s in Survey(jax.make_jaxpr(f)(jnp.ones(4)).jaxpr).sites for v in [s.value] for name in v.names}
    assert found["step"].times == 6 and found["step"].nbytes == 6 * 4 * 4 and found["step"].primitive.name == "sin"
    assert found["in jit"].primitive.name == "tanh" and found["branch"].primitive.name == "exp"
    expected = jax.grad(f)(jnp.ones(4))
    for names in ("step", "in jit", "branch"):
        actual = jax.grad(statetx.remat(f, policy=policies.names(names)))(jnp.ones(4))
        np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_offloaded_values_move_to_host_and_back():
    block = Block()
    f = statetx.remat(block, policy=policies.offload("hidden").then(policies.names("out")))
    pure = statetx.functionalize(f)
    grad = jax.grad(lambda values, x: pure(values, x)[0], 1)
    text = str(jax.make_jaxpr(grad)(pure.values(X), X))
    assert text.count("device_put") >= 2
    np.testing.assert_allclose(jax.jit(grad)(pure.values(X), X), statetx.grad(Block())(X), rtol=1e-5)


# -- errors --------------------------------------------------------------------------------------------------------


def trace(policy, f=None):
    return statetx.eval_shape(lambda x: statetx.grad(statetx.remat(f or Block(), policy=policy))(x), X)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (policies.names("hiden"), r"no value has the name 'hiden'. Did you mean 'hidden'\? .*: 'hidden', 'out'"),
        (policies.names("hidden", "ou"), "Did you mean 'out'"),
        (policies.except_names("inner"), "no value has the name 'inner'"),
        (policies.primitives("tan"), "primitive 'tan'. Did you mean 'tanh'"),
        (policies.path("blocks.*"), "no value is computed with a state whose path matches .*'count', 'v', 'w'"),
        (policies.states(statetx.RngState), "no value is computed from a state that the filter selects.*'?v'?, '?w'?"),
        (policies.dots | policies.names("hiden"), r"dots \| names\('hiden'\): no value has the name 'hiden'"),
    ],
    ids=repr,
)
def test_missing_names_are_reported(policy, message):
    with pytest.raises(statetx.PolicyError, match=message):
        trace(policy)


def test_missing_names_allowed():
    decide._warned.clear()
    with pytest.warns(statetx.PolicyWarning, match="Did you mean 'hidden'") as caught:
        trace(policies.dots | policies.names("hiden", missing="warn"))
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace(policies.dots | policies.names("hiden", missing="warn"))  # said once
        trace(policies.dots | policies.names("hiden", missing="ignore"))
    for theirs in (
        jax.checkpoint_policies.save_only_these_names("hiden"),
        jax.checkpoint_policies.save_any_names_but_these("hiden"),
        jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=["hiden"],
            names_which_can_be_offloaded=[],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    ):
        with pytest.warns(statetx.PolicyWarning, match="Did you mean 'hidden'"):
            trace(theirs)
    with pytest.raises(statetx.PolicyError, match="missing= must be"):
        policies.names("a", missing="maybe")


@pytest.mark.parametrize(
    "checkpoint", [policies.Slots(3, policy=policies.dots), policies.Levels(2, policy=policies.dots)]
)
def test_warning_of_a_loop_points_at_the_users_line(checkpoint):
    # Up to Python 3.11 a cached property has a frame of its own, in functools.
    decide._warned.clear()
    step = lambda c, x: (jnp.tanh(c + x), None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.grad(lambda c: statetx.scan(step, c, jnp.arange(9.0), checkpoint=checkpoint)[0])(1.0)
    assert caught and {w.filename for w in caught if w.category is statetx.PolicyWarning} == {__file__}


@pytest.mark.parametrize(
    ("policy", "same"),
    [
        (policies.larger_than("1GiB"), "nothing"),
        (policies.larger_than(0), "everything"),
        (A & ~A, "nothing"),
        (jax.checkpoint_policies.dots_saveable, "nothing"),
        (jax.checkpoint_policies.save_anything_except_these_names("a"), "everything"),
    ],
    ids=["too large", "any size", "a contradiction", "dots without a product", "jax's anything except"],
)
def test_policy_without_effect_warns_once(policy, same):
    decide._warned.clear()

    def f(x):
        return jnp.sin(statetx.checkpoint_name(jnp.sin(x), "a")).sum()

    with pytest.warns(statetx.PolicyWarning, match=rf"saves {same} \(same as policies\.{same}\)"):
        trace(policy, f)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace(policy, f)
        for plain in (policies.nothing, policies.everything, "nothing_saveable", "everything_saveable"):
            trace(plain, f)
        trace(lambda *_, **__: False, f)  # a user's own policy may select values that only the derivative computes


def test_offload_without_host_memory():
    with pytest.raises(statetx.PolicyError, match=r"(?s)no memory 'nowhere'; they have 'device', .*otherwise='save'"):
        trace(policies.offload("hidden", dst="nowhere"))
    assert shapes(policies.offload("hidden", dst="nowhere", otherwise="save")) == shapes(policies.names("hidden"))
    with pytest.raises(statetx.PolicyError, match="otherwise= must be"):
        policies.offload("hidden", otherwise="hope")
    with pytest.raises(statetx.PolicyError, match="needs names or policies"):
        policies.offload()


def test_mistakes():
    for wrong in (policies.names, policies.path, policies.offload):
        with pytest.raises(statetx.PolicyError, match="is a function that returns a policy: call it"):
            statetx.remat(jnp.sin, policy=wrong)
    with pytest.raises(statetx.PolicyError, match="Did you mean 'everything'"):
        statetx.remat(jnp.sin, policy="everthing")
    with pytest.raises(statetx.PolicyError, match="takes strings, at least one"):
        policies.names()
    with pytest.raises(statetx.PolicyError, match="takes strings"):
        policies.primitives(jax.lax.exp_p)


class Doubled(Rewriter):
    """Twice the results of the function."""

    def rewrite(self, body, name, num_out):
        return lambda operands, *args: [2 * x for x in body(operands, *args)]

    def __repr__(self):
        return "doubled"


REWRITER = Doubled()
COMBINATIONS = {
    "rewriter | policy": lambda: REWRITER | policies.dots,
    "policy | rewriter": lambda: policies.dots | REWRITER,
    "name | rewriter": lambda: "dots" | REWRITER,
    "None & rewriter": lambda: None & REWRITER,
    "policy & rewriter": lambda: policies.dots & REWRITER,
    "rewriter & name": lambda: REWRITER & "dots",
    "~rewriter": lambda: ~REWRITER,
    "rewriter.then": lambda: REWRITER.then(A),
    "policy.then": lambda: A.then(REWRITER),
    "offload": lambda: policies.offload(REWRITER),
    "steps of a loop": lambda: policies.Slots(4, policy=REWRITER),
    "steps of a tuned loop": lambda: policies.Budget("1MiB", policy=REWRITER),
}


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_combination_with_a_rewriter_is_refused_at_once(combination):
    with pytest.raises(statetx.PolicyError, match=r"doubled rewrites the whole function, so it does not combine"):
        COMBINATIONS[combination]()


def test_combination_with_a_plan_by_name_is_refused_at_once():
    with pytest.raises(statetx.PolicyError, match="fit:1.0MiB rewrites the whole function, so it does not combine"):
        policies.dots | "fit:1MiB"


def test_rewriter_in_place_of_a_policy():
    assert not isinstance(REWRITER, policies.Policy)
    doubled = statetx.remat(lambda x: jnp.sin(x).sum(), policy=REWRITER)
    np.testing.assert_allclose(jax.grad(doubled)(jnp.ones(3)), 2 * jnp.cos(jnp.ones(3)), rtol=1e-6)
    report = statetx.memory_report(doubled, jnp.ones(3), policies=["dots", REWRITER])
    assert [row.policy for row in report.rows] == ["no remat", "dots", "doubled"]


@pytest.mark.parametrize("way", ["policy", "gradient"])
def test_calls_of_a_rewritten_function_share_what_jax_has_traced(way):
    traced = []

    @jax.jit
    def inner(x):
        traced.append(x)
        return jnp.sin(x)

    for _ in range(3):
        if way == "policy":
            jax.grad(statetx.remat(inner, policy=REWRITER))(1.0)
        else:
            with rewritten_by(REWRITER):
                jax.grad(inner)(1.0)
    assert len(traced) == 1


@pytest.mark.skipif(REMAT3, reason="jax_remat3: a report leaves nothing plain under jax.checkpoint")
def test_function_that_was_left_plain_for_a_report_is_rematerialized_again():
    block = jax.jit(jax.checkpoint(lambda x: jnp.sin(jnp.sin(x))))

    def slope(x):
        with rewritten_by(REWRITER):
            return jax.grad(block)(x)

    for _ in range(2):
        with override.nothing_checkpointed() as undone:
            jax.make_jaxpr(slope)(0.3)
        assert len(undone) == 1
    assert "remat" in str(jax.make_jaxpr(slope)(0.3))


def test_under_plain_jax_checkpoint():
    def f(x):
        return jnp.sin(statetx.checkpoint_name(jnp.sin(x @ x), "a")).sum()

    for policy in (policies.dots, policies.names("a"), policies.dots | A, policies.larger_than(8), policies.everything):
        np.testing.assert_allclose(
            jax.grad(jax.checkpoint(f, policy=policy))(jnp.eye(3)), jax.grad(f)(jnp.eye(3)), rtol=1e-6
        )
    if REMAT3:
        pytest.skip("jax_remat3: JAX asks no policy but its own")
    gradient = lambda policy: str(jax.make_jaxpr(jax.grad(jax.checkpoint(f, policy=policy)))(jnp.eye(3)))
    num_products = [gradient(p).count("dot_general") for p in (policies.dots, policies.nothing)]
    assert num_products == [3, 4]
    with pytest.raises(statetx.PolicyError, match=r"needs to know the states: use it with statetx\.remat"):
        jax.grad(jax.checkpoint(f, policy=policies.path("w")))(jnp.eye(3))
    with pytest.raises(statetx.PolicyError, match="doubled rewrites the whole function"):
        jax.grad(jax.checkpoint(f, policy=REWRITER))(jnp.eye(3))


EACH = [
    policies.everything,
    policies.nothing,
    policies.dots,
    policies.dots_without_batch_dims,
    policies.names("hidden"),
    policies.names("hidden", "out"),
    policies.except_names("hidden"),
    policies.except_names("out"),
    policies.offload("hidden"),
    policies.larger_than(3 * 7 * 4),
    policies.smaller_than(3 * 7 * 4),
    policies.primitives("sin", "exp"),
    policies.path("v"),
    policies.states("v"),
    policies.names("out") | policies.dots,
    policies.dots & ~policies.states("w"),
    policies.offload("hidden").then(policies.names("out")),
]


def test_residual_tables_of_policies_differ():
    tables = {}
    for policy in EACH:
        kept = statetx.saved_residuals(statetx.remat(Block(), policy=policy), X)
        rows = [(r.names, r.shape, r.nbytes, r.primitive, r.memory) for r in kept if r.origin == "intermediate"]
        tables[policy] = tuple(sorted(rows))
    for (a, table), (b, other) in itertools.combinations(tables.items(), 2):
        assert table != other, f"{a!r} and {b!r} keep the same: {table}"
    assert tables[policies.names("hidden")] == ((("hidden",), (3, 5), 60, "tanh", ""),)
    assert tables[policies.offload("hidden")] == ((("hidden",), (3, 5), 60, "tanh", "pinned_host"),)
    assert tables[policies.nothing] == ()
    names = {policy: {name for row in table for name in row[0]} for policy, table in tables.items()}
    assert names[policies.except_names("hidden")] == {"out"} and names[policies.except_names("out")] == {"hidden"}


# -- unusual operations ----------------------------------------------------------------------------------------------


def _host(x):
    return jax.pure_callback(lambda v: v, jax.typeof(x), jax.lax.stop_gradient(x), vmap_method="sequential")


@jax.custom_jvp
def _pair(x):
    return jnp.exp(x), jnp.sin(x)


_TWICE = 2.0 * np.ones(3, np.float32)


@_pair.defjvp
def _(primals, tangents):
    y = jnp.exp(*primals)  # read before the other result is computed
    dy = y * tangents[0] * jnp.asarray(_TWICE) / 2  # with an array that the rule closes over
    return (y, jnp.sin(*primals)), (dy, jnp.cos(*primals) * tangents[0])


@jax.custom_vjp
def _reverse_only(x):
    return jnp.exp(x)


_reverse_only.defvjp(lambda x: (jnp.exp(x),) * 2, lambda y, ct: (y * ct,))


def _prints(x):
    h = jnp.tanh(x)
    jax.debug.callback(lambda v: None, h.sum())
    return jnp.sin(h)


UNUSUAL = {
    "no derivative": lambda x: jnp.exp(_host(x) * x),
    "two results": lambda x: _pair(jnp.sin(x))[0] * jnp.cos(_pair(x)[1]),
    "custom_vjp": lambda x: jnp.sin(_reverse_only(jnp.sin(x))),
    "infinite where nothing moves": lambda x: jnp.sin(jax.lax.pow(x - 2, jnp.full(3, 3.0)) * x),
    "complex": lambda x: jnp.real(jnp.tanh(jnp.exp(1j * x)) ** 2),
    "read by a callback": _prints,
    "integers": lambda x: jnp.sort(jnp.sin(x)) * jnp.argsort(x),
}


@pytest.mark.sample
@pytest.mark.filterwarnings("ignore::statetx.PolicyWarning")
@pytest.mark.parametrize("policy", ["everything", policies.larger_than(0), ~policies.dots], ids=str)
@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_operations_keep_their_derivatives(name, policy):
    def derivatives(f):
        loss = lambda x: f(x).sum()
        mapped = lambda xs: jax.vmap(f)(xs).sum()
        found = [jax.grad(loss)(x), jax.grad(mapped)(jnp.stack([x, 2 * x]))]
        if name != "custom_vjp":
            found += [jax.jvp(loss, (x,), (x,)), jax.jvp(jax.grad(loss), (x,), (x,))]
        return found

    x = jnp.array([0.3, 0.9, 0.5])
    plain = UNUSUAL[name]
    rematted = statetx.remat(lambda x: plain(x), policy=policy)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5), derivatives(rematted), derivatives(plain))


def _primitives_of_recomputation(f, *args):
    found = []

    def visit(jaxpr, inside):
        for eqn in jaxpr.eqns:
            if inside:
                found.append(eqn.primitive.name)
            for sub in jex_core.jaxprs_in_params(eqn.params):
                again = eqn.primitive.name in ("checkpoint", "remat2") and eqn.params.get("differentiated", False)
                visit(_jax.open_jaxpr(sub)[0], inside or again)

    visit(jax.make_jaxpr(jax.grad(lambda *a: f(*a).sum()))(*args).jaxpr, False)
    return found


def test_saved_result_of_two_is_read_by_the_rule():
    named = lambda x: (lambda y, z: statetx.checkpoint_name(y, "y") * z)(*_pair(x * x))
    again = _primitives_of_recomputation(statetx.remat(named, policy=policies.names("y")), jnp.ones(3))
    assert "exp" not in again and "sin" in again


def test_value_of_undifferentiated_operands_is_saved():
    f = statetx.remat(lambda x, y: x * statetx.checkpoint_name(jnp.exp(y), "e"), policy=policies.names("e"))
    assert "exp" not in _primitives_of_recomputation(f, jnp.ones(3), jnp.ones(3))


def test_named_view_or_full_offload_is_not_everything():
    views = statetx.remat(lambda x: jnp.sin(statetx.checkpoint_name(x.reshape(2, 2), "v")), policy=policies.names("v"))
    elsewhere = policies.offload(policies.everything, dst=current.memory_kinds()[0])
    away = statetx.remat(lambda x: jnp.sin(jnp.sin(x)), policy=elsewhere)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for f in (views, away):
            jax.make_jaxpr(jax.grad(lambda x, f=f: f(x).sum()))(jnp.ones(4))


def _num_kept(f, x):
    return len(jax.tree.leaves(jax.vjp(f, x)[1]))


def test_two_states_holding_one_array():
    # From which of the two the array came cannot be told: it counts as both's.
    array = jnp.eye(3)
    a, b = statetx.Param(array), statetx.Param(array)
    f = lambda x: jnp.sin(b.value @ jnp.sin(a.value @ jnp.sin(x)))
    nothing = _num_kept(statetx.remat(f), jnp.ones(3))
    for path in ("a", "b"):
        assert _num_kept(statetx.remat(f, policy=policies.path(path)), jnp.ones(3)) > nothing


def test_paths_of_refs():
    ref = jax.new_ref(jnp.eye(3))
    f = lambda x: jnp.sin(ref[...] @ jnp.sin(x))
    for policy in (policies.path("ref"), policies.states("ref")):
        assert _num_kept(statetx.remat(f, policy=policy), jnp.ones(3)) > _num_kept(statetx.remat(f), jnp.ones(3))


@pytest.mark.parametrize("policy", [A, policies.larger_than(0), ~policies.dots], ids=str)
def test_under_plain_jax_checkpoint_with_calls_and_callbacks(policy):
    def f(x):
        jax.debug.callback(lambda v: None, jnp.sin(x))
        return (jax.nn.relu(x) * _pair(x)[0] * _reverse_only(x)).sum()

    x = jnp.array([0.3, 0.9, 0.5])
    np.testing.assert_allclose(jax.grad(jax.checkpoint(f, policy=policy))(x), jax.grad(f)(x), rtol=1e-6)
