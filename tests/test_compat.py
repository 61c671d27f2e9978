"""Private names of JAX that statetx relies upon: these tests fail when their meaning shifts upstream."""

import json
import os
import sys
import types

import brainstate
import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

import private_jax
import statetx
from helpers import ENABLE_CHECKS, REMAT3
from statetx import _hooks, _jax, _states
from statetx._jax import buffers, refs
from statetx._jax.estimates import _Sum
from statetx._remat import fence
from statetx._text import short_path
from statetx.kinds.brainstate.kind import KIND

X = jnp.ones(3)


def test_traces_nest_and_name_their_transform():
    names = []

    def note(x):
        names.append(_jax.transform_name(_jax.current_trace()))
        return x

    assert _jax.is_eager()
    jax.jit(note)(1.0)
    jax.grad(note)(1.0)
    jax.vmap(note)(X)
    jax.lax.scan(lambda c, x: (c, note(x)), 0, X)
    jax.lax.while_loop(lambda c: c < 2, note, 0)
    jax.jvp(note, (1.0,), (1.0,))
    jax.checkpoint(note)(1.0)
    assert names == ["jit", "grad", "vmap", "scan", "while_loop", "grad", "checkpoint"]


def test_settings_of_the_compiler_are_told_apart():
    mesh = jax.make_mesh((1,), ("d",))
    here = jax.NamedSharding(mesh, jax.P("d"))
    options = [
        {},
        {"compiler_options": {"xla_llvm_disable_expensive_passes": True}},
        {"in_shardings": here},
        {"out_shardings": here},
    ]
    settings = [_jax.compile_settings(jax.jit(jnp.sin, **o).lower(X)) for o in (*options, {})]
    assert settings[-1] == settings[0] and len(set(map(tuple, settings))) == len(options)


def test_leaked_tracers_belong_to_inner_traces():
    def outer(x):
        anchor = _jax.current_trace()

        def inner(y):
            assert _jax.leaked_tracers({"a": (x, 1, np.ones(2))}, anchor) == []
            assert len(_jax.leaked_tracers([x, y], anchor)) == 1
            assert len(_jax.leaked_tracers([x, y], None)) == 2
            return x * y

        return jax.grad(inner)(2.0) + jax.vmap(inner)(X).sum() + jax.jit(inner)(1.0)

    for transform in (jax.jit, jax.grad, lambda f: lambda x: jax.vmap(f)(x * X)):
        transform(outer)(1.0)


def test_trace_state_identifies_the_trace_of_an_object():
    pytest.importorskip("flax")
    from flax import nnx

    module = nnx.Dict(x=1)
    assert isinstance(module._pytree__state.trace_state.jax_trace, _jax.TraceState)
    found = []
    jax.jit(lambda: found.append(jax.extend.core.get_opaque_trace_state()))()
    assert module._pytree__state.trace_state.jax_trace == jax.extend.core.get_opaque_trace_state() != found[0]


def test_loop_bodies_are_recognized():
    seen = []

    def note(*args):
        seen.append(_jax.in_loop_body())
        return args[-1]

    jax.lax.scan(lambda c, x: (c, note(x)), 0, X)
    jax.lax.fori_loop(0, jnp.asarray(2), note, 0)
    jax.lax.fori_loop(0, 2, note, 0)
    jax.lax.while_loop(lambda c: c < 2, note, 3)
    jax.lax.map(note, X)
    assert all(seen) and len(seen) >= 4
    seen.clear()
    jax.jit(note)(1.0)
    jax.lax.scan(lambda c, x: (c, jax.grad(note)(x)), 0, X)
    jax.lax.cond(True, note, note, 1.0)
    assert not any(seen) and len(seen) >= 3


def test_inputs_added_while_staging_come_last_in_order():
    def f(x):
        a = _jax.new_input(_jax.current_trace(), jax.typeof(jnp.ones((2, 3))))
        y = jnp.sin(x)
        b = _jax.new_input(_jax.current_trace(), jax.typeof(jnp.int32(1)))
        return [y * b + a.sum(), a]

    jaxpr, consts = _jax.stage(f, [jax.typeof(X)], traced_for="scan", name="f")
    assert consts == [] and [v.aval.shape for v in jaxpr.invars] == [(3,), (2, 3), ()]
    outs = _jax.evaluate(jaxpr, (), (X, jnp.ones((2, 3)), jnp.int32(2)))
    np.testing.assert_allclose(outs[0], jnp.sin(X) * 2 + 6, rtol=1e-6)
    jax.extend.core.check_jaxpr(jaxpr)


def test_closed_over_values_are_constants_of_the_jaxpr():
    def outer(x):
        jaxpr, consts = _jax.stage(lambda y: [y * x], [jax.typeof(X)], traced_for="jit", name="f")
        assert len(consts) == 1 and consts[0] is x
        return _jax.evaluate(jaxpr, consts, (X,))[0].sum()

    assert jax.grad(outer)(2.0) == 3.0


def test_weak_types_and_slices():
    assert _jax.with_weak_type(jnp.float32(1), True).weak_type
    assert not _jax.with_weak_type(jax.jit(lambda: 1.0)(), False).weak_type
    aval = _jax.abstract(np.ones((2, 3, 4), np.float32))
    assert _jax.drop_axis(aval, 1).shape == (2, 4) and _jax.drop_axis(aval, -1).shape == (2, 3)
    assert _jax.abstract(1.0).weak_type and _jax.abstract(np.float64(1)).dtype == jnp.float32


def test_derivative_rules_of_jax_differ_from_users():
    @jax.custom_jvp
    def own(x):
        return x

    own.defjvps(lambda t, out, x: t)

    def rules(f):
        jaxpr, _ = _jax.stage(lambda x: [f(x)], [jax.typeof(X)], traced_for="jit", name="f")
        return [_jax.derivative_rule(e.params["jvp_jaxpr_fun"]) for e in jaxpr.eqns if "jvp_jaxpr_fun" in e.params]

    (first,), (second,) = rules(jax.nn.relu), rules(jax.nn.relu)
    assert first is not None and first == second
    assert rules(own) == [None]


def test_settings_are_distinguished():
    plain = _jax.trace_context()
    assert plain == _jax.trace_context()
    with jax.default_matmul_precision("highest"):
        assert _jax.trace_context() != plain
    with jax.enable_x64(True):
        assert _jax.trace_context() != plain


def test_places_outside_the_libraries():
    source_info = jax.jit(lambda x: x * 2).trace(1.0).jaxpr.eqns[0].source_info
    folders = (_jax.JAX_FOLDER,)
    assert __file__ in _jax.traceback_site(source_info.traceback, folders)
    assert _jax.traceback_site(None, folders) == "unknown place"


def test_copied_equations_equal_evaluated_equations():
    def f(x, n):
        with jax.named_scope("inner"):
            y = jax.nn.relu(x) * jnp.arange(3.0)
        return [y + n, x, np.float32(2)]

    jaxpr, consts = _jax.stage(f, [jax.typeof(X), jax.typeof(jnp.ones(()))], traced_for="jit", name="f")

    def copied(x):
        with jax.named_scope("outer"):
            return _jax.evaluate(jaxpr, consts, (x, 1.0 * x[0]))

    def run(x):
        with jax.named_scope("outer"):
            return jax.extend.core.jaxpr_as_fun(_jax.ClosedJaxpr(jaxpr, consts))(x, 1.0 * x[0])

    ours, theirs = jax.make_jaxpr(copied)(X), jax.make_jaxpr(run)(X)
    assert str(ours) == str(theirs)
    for a, b in zip(ours.eqns, theirs.eqns, strict=True):
        assert a.source_info.name_stack == b.source_info.name_stack and a.ctx == b.ctx
    ours_at, theirs_at = (
        [_jax.traceback_site(e.source_info.traceback, (_jax.JAX_FOLDER,)) for e in j.eqns[-2:]] for j in (ours, theirs)
    )
    assert ours_at == theirs_at
    jax.extend.core.check_jaxpr(ours.jaxpr)


@pytest.mark.skipif(ENABLE_CHECKS, reason="JAX_ENABLE_CHECKS: JAX evaluates no jaxpr with another dtype than its own")
def test_evaluate_with_arguments_of_other_types():
    jaxpr, consts = _jax.stage(lambda x: [jnp.sin(x)], [jax.typeof(X)], traced_for="jit", name="f")
    outs = jax.make_jaxpr(lambda x: _jax.evaluate(jaxpr, consts, (x,)))(jnp.ones(3, jnp.bfloat16)).out_avals
    assert outs[0].dtype == jnp.bfloat16


@pytest.mark.skipif(REMAT3, reason="jax_remat3: jax.checkpoint makes another equation than ours")
def test_rematerialized_jaxpr_equals_rematerialized_function():
    jaxpr, _ = _jax.stage(lambda x, y: [jnp.sin(x) * y], [jax.typeof(X)] * 2, traced_for="jit", name="f")
    policy = jax.checkpoint_policies.dots_saveable

    def ours(x, y):
        return _jax.rematerialize(jaxpr, [x, y], policy=policy, prevent_cse=(True, False))

    theirs = jax.checkpoint(lambda x, y: [jnp.sin(x) * y], policy=policy, prevent_cse=(True, False))
    assert str(jax.make_jaxpr(ours)(X, X)) == str(jax.make_jaxpr(theirs)(X, X))
    loss = lambda f: lambda x: f(x, 2 * x)[0].sum()
    np.testing.assert_allclose(jax.grad(loss(ours))(X), jax.grad(loss(theirs))(X), rtol=1e-6)
    twice = jax.make_jaxpr(lambda x: [ours(x, x), ours(x, x)])(X)
    assert twice.eqns[0].params["jaxpr"] is twice.eqns[1].params["jaxpr"]


def test_vmaps_are_found_and_observed():
    noticed, mapped = [], []

    def notice(axis, is_mapped):
        noticed.append((axis.size, is_mapped))
        return notice

    def f(x, y):
        vmaps = _jax.enclosing_vmaps()
        mapped.append(
            [(t.axis_data.size, *(_jax.mapped_in_each(v, vmaps)[n] for v in (x, y))) for n, t in enumerate(vmaps)]
        )
        return _jax.notify_of_vmap([x, y], 0, notice) * y

    x, y = jnp.ones((2, 3)), jnp.ones(3)
    f(y, y)
    assert mapped.pop() == [] and not noticed
    expected = jax.vmap(lambda x: jax.vmap(lambda x, y: x * y)(x, y))(x)
    np.testing.assert_array_equal(jax.vmap(lambda x: jax.vmap(f)(x, y))(x), expected)
    assert mapped.pop() == [(3, True, True), (2, True, False)]
    assert noticed == [(3, [True, True]), (2, [True, False])]
    noticed.clear()
    jitted = jax.jit(f)
    jitted(y, y)
    assert not noticed
    jax.vmap(jitted, (0, None))(x, y)
    assert noticed == [(2, [True, False])]
    jax.vmap(jax.grad(lambda x: f(x, y).sum()))(x)
    assert mapped.pop() == [(2, True, False)]
    jax.vmap(jax.jit(jax.grad(lambda x: f(x, y[0]))))(y)
    assert mapped.pop() == [(3, True, True)]  # tracers of the jit do not say whether they are mapped


def test_plain_loop_is_linearized_by_the_rule_of_scan(monkeypatch):
    import statetx

    traced, fallback = [], _jax.batching._ad.fallback_linearize_rule

    def noted(primitive, *args, **params):
        traced.append(primitive.name)
        return fallback(primitive, *args, **params)

    monkeypatch.setattr(_jax.batching._ad, "fallback_linearize_rule", noted)
    loop = lambda x: statetx.scan(lambda c, _: (c * 0.5, None), x, None, 70, checkpoint="auto")[0]
    np.testing.assert_allclose(jax.grad(loop)(1.0), 0.5**70, rtol=1e-5)
    assert "mul" in traced and "statetx_loop" not in traced


def _layer(w, x):
    return jnp.tanh(x @ w)


def test_fields_of_compiled_programs():
    """XLA's messages, decoded by the numbers of their fields: instructions, schedule, places, names, donation,
    loops.
    """

    def step(params, x):
        def body(carry, _):
            return jnp.sin(carry @ params["w"]), carry

        carry, carries = jax.lax.scan(body, _layer(params["w"], x), None, length=7)
        return {"w": params["w"] + carries.sum()}, carry

    args = {"w": jnp.ones((64, 64))}, jnp.ones((32, 64))
    with _jax.without_compilation_cache():  # which has the lines of an older file
        compiled = jax.jit(step, donate_argnames="params").lower(*args).compile()
    program, memory = _jax.compiled_program(compiled), compiled.memory_analysis()
    assert program is not None and "step" in program.name

    entry = program.computations[program.entry]
    parameters = {i.index: i for i in entry.instructions if i.opcode == "parameter"}
    assert [parameters[n].op_name for n in range(2)] == ["params['w']", "x"]
    assert [parameters[n].type for n in range(2)] == ["f32[64,64]", "f32[32,64]"]
    # In the schedule each instruction follows its operands.
    place = {i.id: n for n, i in enumerate(entry.instructions)}
    assert all(place[o] < place[i.id] for i in entry.instructions for o in i.operands)
    assert entry.root in place
    (loop,) = [i for i in program.instructions.values() if i.opcode == "while"]
    assert loop.trip_count == 7 and len(loop.called) == 2
    body, condition = (program.computations[c] for c in loop.called)
    assert program.instructions[condition.root].type == "bool[]" and isinstance(
        program.instructions[body.root].type, tuple
    )

    tanh = next(i for i in entry.instructions if i.op_name.endswith("/tanh"))
    assert [f.function for f in tanh.frames][:2] == ["_layer", "test_fields_of_compiled_programs.step"]
    assert tanh.frames[0].file == __file__ and tanh.frames[0].line == _layer.__code__.co_firstlineno + 1
    assert tanh.frames[0].column > 0

    allocations = program.allocations
    assert sum(a.num_bytes for a in allocations if a.parameter is not None) == memory.argument_size_in_bytes
    assert sum(a.num_bytes for a in allocations if a.is_output) == memory.output_size_in_bytes
    both = [a for a in allocations if a.is_output and a.parameter is not None]
    assert sum(a.num_bytes for a in both) == memory.alias_size_in_bytes == 64 * 64 * 4
    rest = [a for a in allocations if a.parameter is None and not (a.is_output or a.is_constant or a.is_thread_local)]
    assert sum(a.num_bytes for a in rest) == memory.temp_size_in_bytes > 0
    for a in allocations:
        for value, offset, size in a.values:
            assert program.values[value].num_bytes == size and 0 <= offset <= a.num_bytes - size


def test_targets_of_calls_of_libraries():
    compiled = jax.jit(jnp.linalg.cholesky).lower(jnp.eye(4)).compile()
    program = _jax.compiled_program(compiled)
    assert program is not None
    targets = [i.target for i in program.instructions.values() if i.opcode == "custom-call"]
    assert targets and all(f'custom_call_target="{t}"' in compiled.as_text() for t in targets)
    assert not any(map(_jax.product_of, program.instructions.values())), "a factorization is no product"
    for target, name in {"__cublas$lt$matmul": "dot_general", "__cudnn$convForward": "conv_general_dilated"}.items():
        assert _jax.product_of(types.SimpleNamespace(opcode="custom-call", target=target)) == name


def test_allocations_in_other_memories():
    """As GPUs tell offloaded values, and TPUs those in the memory of a core; a CPU has one memory."""

    def message(*memory_space):
        allocation = bytes([0x08, 0, 0x10, 100, *memory_space])  # index 0, 100 bytes
        return buffers._message(bytes([0x1A, len(allocation)]) + allocation)

    for memory_space, on_gpu, on_tpu in (((), False, False), ((0x40, 1), False, True), ((0x40, 5), True, True)):
        for platform, is_elsewhere in (("gpu", on_gpu), ("tpu", on_tpu)):
            _, (allocation,) = buffers._assignment(message(*memory_space), platform)
            assert (allocation.num_bytes, allocation.is_elsewhere) == (100, is_elsewhere)


def test_program_without_buffer_assignment():
    class Compiled:
        def memory_analysis(self):
            raise NotImplementedError

    assert _jax.compiled_program(Compiled()) is None


def test_functions_that_jax_differentiates_are_seen(monkeypatch):
    """By `jax.grad` and others under any name, once each, with the user's function; not by forward mode."""
    from statetx._jax import rules

    seen = []
    monkeypatch.setattr(rules, "_replace", lambda fun, has_aux: seen.append((fun, has_aux)) or fun)

    def square(x):
        return x * x

    jax.grad(square)(2.0)
    jax.value_and_grad(lambda x: (x * x, x), has_aux=True)(2.0)
    jax.vjp(square, 2.0)
    jax.jacrev(square)(2.0)
    assert [has_aux for _, has_aux in seen] == [False, True, False, False]
    assert all(_jax.differentiated_function(seen[i][0]) is square for i in (0, 2))
    seen.clear()
    jax.linearize(square, 2.0)
    jax.jvp(square, (2.0,), (1.0,))
    jax.jacfwd(square)(2.0)
    assert not seen
    monkeypatch.setattr(rules, "_replace", lambda fun, has_aux: lambda *primals: fun(*primals) * 3)
    assert jax.grad(square)(2.0) == 12.0


def test_backward_passes_are_recognized():
    seen = []

    @jax.custom_vjp
    def f(x):
        return x

    f.defvjp(
        lambda x: (seen.append(_jax.in_backward_pass()) or x, None),
        lambda _, ct: seen.append(_jax.in_backward_pass()) or (ct,),
    )
    jax.grad(f)(1.0)
    jax.jit(jax.grad(lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, length=2)[0]))(1.0)
    assert seen[0] is False and seen[1] is True and len(seen) >= 4 and not _jax.in_backward_pass()


def test_value_of_a_ref_is_a_copy_of_its_buffer():
    sharded = jax.device_put(jnp.ones(4), jax.NamedSharding(jax.make_mesh((2,), ("d",)), jax.P("d")))
    for value in (X, jnp.asarray(1.0), sharded, jax.device_put(X, jax.devices()[1]), jax.random.key(0)):
        ref = jax.new_ref(value)
        holder, buffer = refs._buffer_of(ref)
        read = _jax.ref_value(ref)
        assert holder._buf is buffer, "JAX's own read takes the buffer, and an interrupt loses the value"
        theirs = ref[...]
        about = [(jax.typeof(x), x.sharding, x.committed) for x in (read, theirs)]
        assert about[0] == about[1] and bool((read == theirs).all())
    assert jax.make_jaxpr(lambda r: _jax.ref_value(r))(jax.new_ref(X)).eqns[0].primitive.name == "get"

    ref, double = jax.new_ref(X), jax.jit(lambda r: r.addupdate(r[...]))
    read, new = _jax.ref_value(ref), 3 * X
    double(ref)  # in place
    store, *args = _jax.ref_store(ref, new)
    assert (read[0], ref[0]) == (1, 2)
    store(*args)
    double(ref)
    assert (new[0], ref[0]) == (3, 6)


# -- the list of private names ---------------------------------------------------------------------------------------


def test_every_private_name_is_listed_with_what_it_is_for():
    listed = private_jax.table()
    assert private_jax.used() == set(listed)
    assert all(len(row) == 2 and all(row) for row in listed.values())


@pytest.mark.parametrize("name", private_jax.table())
def test_private_name_is_in_this_jax_with_the_parameters_that_calls_need(name):
    if private_jax.lookup(name) is None:
        assert name in private_jax.OPTIONAL
    elif name in private_jax.NEEDED:
        assert set(private_jax.NEEDED[name].split()) <= private_jax.parameters(name)


def test_private_batch_tracers():
    def f(x, y):
        trace = _jax.current_trace()
        s = _jax.batch_tracer(trace, jnp.arange(6.0).reshape(2, 3), 1)
        assert s.shape == (2,) and _jax.batch_size(trace) == 3
        assert _jax.is_batched(x, trace) and _jax.is_batched(s, trace) and not _jax.is_batched(y, trace)
        with _jax.in_parent_trace(trace):
            assert _jax.is_eager()
        return (s * x).sum()

    np.testing.assert_array_equal(jax.vmap(f, (0, None))(jnp.ones(3), 1.0), [3, 5, 7])


def test_discharge_as_relied_upon():
    ref = jax.new_ref(X)
    jaxpr, consts = _jax.stage(lambda x: [x * ref[...].sum()], [jax.typeof(1.0)], traced_for="jit", name="f")
    assert consts == [ref] and _jax.touches_refs(jaxpr, consts)
    plain = _jax.rebuild(jaxpr, invars=[*jaxpr.constvars, *jaxpr.invars], outvars=jaxpr.outvars)
    explicit, is_ref, written = _jax.discharge_refs(plain)
    assert is_ref == [True, False] and written == [False, False] and len(explicit.outvars) == 1
    assert [v.aval.shape for v in explicit.invars] == [(3,), ()]


def test_edited_equations_are_type_checked(tmp_path):
    """In this suite: JAX's check costs about as much as the edit."""
    jaxpr = jax.make_jaxpr(lambda x: jnp.sin(jnp.cos(x)))(1.0).jaxpr
    with pytest.raises(jax.errors.JaxprTypeError, match="not defined"):
        _jax.with_equations(jaxpr, jaxpr.eqns[1:])


def test_residual_keys_leave_the_branch():
    """In a gradient of gradients, a residual of the recomputation may be a key."""

    def draw(x, key):
        key = jax.random.split(key)[0]
        return x * jax.random.normal(key, x.shape), key

    args = (jnp.ones(3), jax.random.key(0))
    params = {"policy": fence.with_fence(None, "cond"), "prevent_cse": True, "differentiated": True}
    fenced = jax.jit(lambda *args: _jax.remat_p.bind(*args, jaxpr=jax.make_jaxpr(draw)(*args).jaxpr, **params))
    assert "stablehlo.case" in fenced.lower(*args).as_text()
    for a, b in zip(fenced(*args), draw(*args), strict=True):
        np.testing.assert_array_equal(*(jax.random.key_data(k) if k.dtype == args[1].dtype else k for k in (a, b)))


def test_folder_whose_name_begins_like_a_librarys_is_the_users():
    from jax._src import source_info_util

    statetx.states(brainstate.State(0.0))  # a library has a folder once its states are used

    for library in ("statetx", "jax", "brainstate"):
        folder = next(f for f in _states.library_folders() if f.rstrip(os.sep).endswith(os.sep + library))
        file = folder.rstrip(os.sep) + "_demo" + os.sep + "a.py"
        scope = {"call_site": _states.call_site}
        exec(compile("def f():\n    return call_site()", file, "exec"), scope)
        assert scope["f"]() == f"{file}:2"
        assert source_info_util.is_user_filename(file)


def test_settings_of_a_library_that_is_imported_later_are_part_of_the_key(monkeypatch):
    monkeypatch.setattr(_states, "pending", ("late",))
    monkeypatch.setattr(_states, "modal", [])
    monkeypatch.setattr(_states, "_kinds", [kind for kind in _states.kinds() if kind is not KIND])
    monkeypatch.setitem(_hooks.foreign_kinds, "late", lambda: KIND)
    step = statetx.jit(lambda x: x * brainstate.environ.get("dt", 1.0))
    assert step(1.0) == 1.0
    monkeypatch.setitem(sys.modules, "late", brainstate)
    for dt in (2.0, 3.0):
        with brainstate.environ.context(dt=dt):
            assert step(1.0) == dt


@pytest.mark.parametrize(
    "path, shown",
    [("model/net.py", "model/net.py"), (".venv/lib/site-packages/library/net.py", "net.py"), ("../net.py", "net.py")],
)
def test_shown_path_is_relative_for_files_of_the_project_alone(path, shown):
    assert short_path(os.path.abspath(path)) == shown


# -- times that XLA:GPU estimates, summed over kernels; compiled programs are in test_target_programs.py ---------------

US = 1.0  # of each launch


def kernel(microseconds, opcode="fusion", tiled=None):
    costs = [{"name": "", "exec_time_us": 1000.0}, {"name": "sol", "exec_time_us": microseconds}]
    costs += [] if tiled is None else [{"name": "indexing-cost-model", "exec_time_us": tiled}]
    return instruction(opcode, config=json.dumps({"reification_cost": costs}))


def instruction(opcode, *called, config="", trip_count=None, target=""):
    return types.SimpleNamespace(
        opcode=opcode, called=called, backend_config=config, trip_count=trip_count, target=target
    )


BODY, CONDITION, OTHER, UNKNOWN = 1, 2, 3, 4
COMPUTATIONS = {
    BODY: [kernel(3.0), kernel(2.0)],
    CONDITION: [kernel(0.5)],
    OTHER: [kernel(20.0)],
    UNKNOWN: [instruction("custom-call", target="__cublas$gemm")],
}


@pytest.mark.parametrize(
    "instructions, expected",
    [
        ([kernel(3.0), instruction("bitcast"), instruction("custom-call", target="Sharding")], 3 + US),
        ([instruction("while", BODY, CONDITION, trip_count=10)], 10 * (5 + 2 * US)),
        ([instruction("while", BODY, CONDITION)], None),
        ([instruction("conditional", BODY, OTHER)], 20 + US),
        ([instruction("conditional", BODY, UNKNOWN)], None),
        ([instruction("call", BODY), instruction("async-start", OTHER), instruction("async-done")], 25 + 3 * US),
        ([kernel(3.0), instruction("call", UNKNOWN)], None),
        ([instruction("all-reduce-start"), instruction("all-reduce-done")], None),
        ([instruction("copy-start"), instruction("copy-done")], None),
        ([kernel(0.01, tiled=160.0), kernel(0.01)], 160.01 + 2 * US),
        ([kernel(60.0, tiled=800.0)], 60 + US),
        ([kernel(7.0, "all-reduce-start"), instruction("all-reduce-done")], 7 + US),
    ],
)
def test_sum_of_a_program(instructions, expected):  # in microseconds
    computations = {n: buffers.Computation(n, str(n), 0, i) for n, i in {**COMPUTATIONS, 0: instructions}.items()}
    assert _Sum(computations).of(computations[0]) == (None if expected is None else pytest.approx(expected / 1e6))
