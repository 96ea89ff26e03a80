# The engine for Python: thin owners that convert, release the GIL, call and convert back. Documented in _engine.pyi.
# cython: language_level=3, binding=True, freethreading_compatible=False

import os
from collections import namedtuple

import numpy as np

from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.unicode cimport PyUnicode_DecodeUTF8
from cython.operator cimport dereference as deref
from libc.stddef cimport size_t
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t
from libcpp cimport bool as cpp_bool
from libcpp.memory cimport shared_ptr
from libcpp.optional cimport optional
from libcpp.string cimport string
from libcpp.utility cimport pair
from libcpp.vector cimport vector

from pyllama cimport _engine_native as native
from pyllama._engine_native cimport (
    ByteSpan, FlagSpan, FloatSpan, GgufValueType, MaskSpan, PoolingType, QuantType, SamplerStage, TokenSpan, byte,
    string_view, traits, view_of,
)
from pyllama.errors import InvalidArgument, PyllamaError

KeyValue = namedtuple("KeyValue", "key type value")
TypeTraits = namedtuple("TypeTraits", "id block_values block_bytes is_quantized")
TensorInfo = namedtuple("TensorInfo", "name type_name shape offset n_bytes shard")
Work = namedtuple("Work", "seq_id tokens sampler n_probs post_sampling_probs logits draft proposals ends synthetic masks",
                  defaults=(None, 0, False, None, (), (), (), None, None))
EmbeddingWork = namedtuple("EmbeddingWork", "seq_id tokens pool ends", defaults=(True,))
StepOutput = namedtuple("StepOutput", "seq_id token logprob top")
BlockDraft = namedtuple("BlockDraft", "tokens scores confidences")
InputSums = namedtuple("InputSums", "squares n_rows")
PrefixReuse = namedtuple("PrefixReuse", "length matched source checkpoint limit moved", defaults=(0,))
CacheUsage = namedtuple("CacheUsage", "budget used kv_bytes checkpoint_bytes n_nodes n_checkpoints n_evicted")

cdef str text(string_view view):
    # Token texts may be any bytes: invalid UTF-8 survives as lone surrogates and round-trips.
    return PyUnicode_DecodeUTF8(view.data(), view.size(), "surrogateescape")


cdef string native_path(path) except *:
    return os.fsencode(path)


include "_gguf.pxi"


def backend_info():
    names = [name.decode() for name in native.available_isas()]
    return {
        "isa": names[-1],
        "available": names,
        "devices": [name.decode() for name in native.available_devices()],
        "cuda": native.kernels_text().decode(),
        "version": native.version_text().decode(),
        "compiler": native.compiler_text().decode(),
        "build_number": native.build_number(),
        "commit": native.commit_text().decode(),
    }


def cuda_status():
    cdef native.CudaStatus status
    with nogil:
        status = native.cuda_status()
    devices = []
    cdef size_t i
    for i in range(status.devices.size()):
        devices.append({
            "device": status.devices[i].info.device_name().decode(),
            "name": status.devices[i].info.name.decode(),
            "pci_bus_id": status.devices[i].info.pci_bus_id.decode(),
            "capability": status.devices[i].info.capability().decode(),
            "multiprocessors": status.devices[i].info.multiprocessors,
            "total_bytes": status.devices[i].info.total_bytes,
            "free_bytes": status.devices[i].free_bytes,
            "ecc": status.devices[i].info.has_ecc,
            "peers": [int(peer) for peer in status.devices[i].info.peers],
            "problem": status.devices[i].problem.decode(),
        })
    return {
        "kernels": status.kernels.decode(),
        "driver": status.driver.decode(),
        "has_driver": status.has_driver,
        "devices": devices,
    }


cdef native.PlacementParams placement_params(devices, str split_mode, tensor_split, int32_t main_gpu, tensor_overrides,
                                             device_layers) except *:
    cdef native.PlacementParams params
    cdef native.TensorOverride tensor_override
    for device in devices:
        params.devices.push_back(<string>device.encode())
    params.split_mode = split_mode.encode()
    for share in tensor_split:
        params.shares.push_back(<double>share)
    params.main_device = main_gpu
    for pattern, device in tensor_overrides:
        tensor_override.pattern = pattern.encode()
        tensor_override.device = device.encode()
        params.overrides.push_back(tensor_override)
    if device_layers is not None:
        params.device_layers = <int32_t>device_layers
    return params


cdef int add_overrides(native.MetadataOverrides& overrides, values) except -1:
    for key, value in values.items():
        native_key = key.encode()
        if isinstance(value, bool):
            native.override_bool(overrides, native_key, value)
        elif isinstance(value, int):
            native.override_int(overrides, native_key, value)
        elif isinstance(value, float):
            native.override_float(overrides, native_key, value)
        elif isinstance(value, str):
            native.override_string(overrides, native_key, value.encode())
        else:
            raise InvalidArgument(f"override of {key}: {type(value).__name__} is not int, float, bool or str")
    return 0


cdef class Model:
    cdef shared_ptr[const native.LoadedModel] ptr
    cdef object _metadata
    cdef dict _overrides
    cdef readonly str path

    def __init__(self, path, *, int32_t n_threads=0, bint check_tensors=False, bint load_mtp=False, mtp_file=None, drafter=None,
                 kv_overrides=None,
                 str isa="auto", devices=(), str split_mode="layer", tensor_split=(), int32_t main_gpu=0,
                 tensor_overrides=(), device_layers=None):
        cdef native.ModelParams params
        params.path = native_path(path)
        params.n_threads = n_threads
        params.check_tensors = check_tensors
        params.load_mtp = load_mtp
        if mtp_file is not None:
            params.mtp_file = native_path(mtp_file)
        if drafter is not None:
            params.drafter = native_path(drafter)
        params.isa = isa.encode()
        params.placement = placement_params(devices, split_mode, tensor_split, main_gpu, tensor_overrides, device_layers)
        self._overrides = dict(kv_overrides or {})
        add_overrides(params.kv_overrides, self._overrides)
        cdef shared_ptr[const native.LoadedModel] loaded
        with nogil:
            loaded = native.load_model(params)
        self.ptr = loaded
        self.path = os.fsdecode(path)

    cdef const native.LoadedModel* model(self) except NULL:
        if not self.ptr:
            raise PyllamaError("the model is closed")
        return self.ptr.get()

    @property
    def metadata(self):
        if self._metadata is None:
            self._metadata = python_metadata(self.model().file()) | self._overrides
        return self._metadata

    @property
    def architecture(self):
        return self.model().text().hyperparameters().architecture.decode()

    @property
    def isa(self):
        return text(self.model().backend().name())

    @property
    def n_vocab(self):
        return self.model().text().hyperparameters().vocab

    @property
    def n_ctx_train(self):
        return self.model().text().hyperparameters().context_length

    @property
    def n_embd(self):
        return self.model().text().hyperparameters().hidden

    @property
    def n_layer(self):
        return self.model().text().hyperparameters().layers

    @property
    def pooling_type(self):
        return _pooling_names[<int>self.model().text().hyperparameters().pooling]

    @property
    def n_labels(self):
        return self.model().text().hyperparameters().labels if self.model().text().classifier() != NULL else 0

    @property
    def is_recurrent(self):
        return bool(self.model().text().is_recurrent())

    @property
    def n_swa(self):
        return self.model().text().sliding_window()

    @property
    def n_mtp(self):
        return self.model().text().loaded_mtp_blocks()

    @property
    def n_params(self):
        return self.model().n_params()

    @property
    def size_bytes(self):
        return self.model().size_bytes()

    @property
    def ftype_label(self):
        return self.model().file_type_label().decode()

    @property
    def description(self):
        return self.model().description().decode("utf-8", "replace")

    @property
    def devices(self):
        return tuple(name.decode() for name in self.model().placement().devices())

    @property
    def layer_devices(self):
        cdef optional[int32_t] rank
        devices, names = self.devices, []
        for layer in range(self.n_layer):
            rank = self.model().placement().rank_of(layer)
            names.append(devices[rank.value()] if rank.has_value() else devices[0] if len(devices) == 1 else None)
        return tuple(names)

    @property
    def rank_bytes(self):
        return tuple(self.model().rank_bytes())

    def close(self):
        cdef shared_ptr[const native.LoadedModel] last
        last.swap(self.ptr)
        with nogil:  # unmapping gigabytes takes a while
            last.reset()

    def __dealloc__(self):
        self.ptr.reset()


cdef vector[int32_t] token_vector(tokens) except *:
    cdef vector[int32_t] result
    cdef const int32_t[::1] view
    if isinstance(tokens, np.ndarray):
        view = np.ascontiguousarray(tokens, dtype=np.int32)
        if view.shape[0]:
            result.assign(&view[0], &view[0] + view.shape[0])
        return result
    result.reserve(len(tokens))
    for token in tokens:
        if isinstance(token, bool) or not hasattr(token, "__index__"):
            raise InvalidArgument(f"token id {token!r} is not an integer")
        if not -2147483648 <= token <= 2147483647:
            raise InvalidArgument(f"token id {token} is outside the vocabulary")
        result.push_back(token)
    return result


include "_memory_needs.pxi"
include "_sampling.pxi"


cdef dict _pooling_types = {
    "none": <int>PoolingType.none, "mean": <int>PoolingType.mean, "cls": <int>PoolingType.cls,
    "last": <int>PoolingType.last, "rank": <int>PoolingType.rank,
}
pooling_types = tuple(_pooling_types)
cdef dict _pooling_names = {number: name for name, number in _pooling_types.items()}


cdef class HiddenPool:
    cdef shared_ptr[native.HiddenPool] ptr

    def __init__(self, str pooling_type not None, int32_t n_embd):
        if pooling_type not in _pooling_types:
            raise InvalidArgument(f"pooling type '{pooling_type}' is not one of {', '.join(_pooling_types)}")
        self.ptr = native.new_hidden_pool(<PoolingType><int>_pooling_types[pooling_type], n_embd)

    @property
    def pooling_type(self):
        return _pooling_names[<int>self.ptr.get().type()]

    @property
    def n_tokens(self):
        return self.ptr.get().n_tokens()

    @property
    def is_complete(self):
        return self.ptr.get().is_complete()

    def values(self):
        cdef vector[float] values = self.ptr.get().values()
        result = np.empty(values.size(), dtype=np.float32)
        if values.size():
            np.copyto(result, <const float[:values.size()]>values.data())
        return result.reshape(-1, self.ptr.get().hidden()) if self.ptr.get().type() == PoolingType.none else result


cdef class LogitsRow:
    cdef vector[float] values

    def draw(self, int32_t seq_id, Sampler sampler not None, int32_t n_probs=0, bint post_sampling_probs=False):
        cdef native.StepOutput output
        cdef int32_t token
        if self.values.empty():
            raise InvalidArgument("the row has no logits yet")
        cdef FloatSpan view = FloatSpan(self.values.data(), self.values.size())
        with nogil:
            output = native.draw_token(seq_id, deref(sampler.ptr), view, n_probs, post_sampling_probs)
            token = output.token
            sampler.ptr.get().accept(TokenSpan(&token, 1))
        return StepOutput(output.sequence, output.token, output.logprob, probability_list(output.top))


cdef class LoraAdapter:
    cdef shared_ptr[const native.LoraAdapter] ptr
    cdef readonly str path

    def __init__(self, Model model not None, path, *, int32_t n_threads=0):
        cdef string file = native_path(path)
        model.model()
        cdef shared_ptr[const native.LoadedModel] shared = model.ptr
        cdef shared_ptr[const native.LoraAdapter] loaded
        with nogil:
            loaded = native.load_adapter(shared, file, n_threads)
        self.ptr = loaded
        self.path = os.fsdecode(path)

    @property
    def task_name(self):
        return self.ptr.get().task_name().decode("utf-8", "replace")

    @property
    def prompt_prefix(self):
        return self.ptr.get().prompt_prefix().decode("utf-8", "replace")


cdef class ControlVector:
    cdef shared_ptr[const native.ControlVector] ptr

    def __init__(self, Model model not None, files, *, int32_t first_layer=0, int32_t last_layer=0):
        cdef vector[native.ControlVectorFile] native_files
        cdef native.ControlVectorFile file
        for path, scale in files:
            file.path = native_path(path)
            file.scale = scale
            native_files.push_back(file)
        model.model()
        cdef shared_ptr[const native.LoadedModel] shared = model.ptr
        cdef shared_ptr[const native.ControlVector] loaded
        with nogil:
            loaded = native.load_control_vector(deref(shared), native_files, first_layer, last_layer)
        self.ptr = loaded


cdef class Engine:
    cdef shared_ptr[native.Engine] ptr
    cdef int32_t n_vocab

    def __init__(self, Model model not None, *, int32_t n_ctx, int32_t n_seq_max=1, int32_t n_batch=2048,
                 int32_t n_ubatch=512, int32_t n_threads=0, int32_t n_threads_batch=0, str type_k="f16", str type_v="f16",
                 str rope_scaling_type=None, double rope_freq_base=0.0, double rope_freq_scale=0.0, int32_t yarn_orig_ctx=0,
                 double yarn_ext_factor=-1.0, double yarn_attn_factor=-1.0, double yarn_beta_fast=-1.0,
                 double yarn_beta_slow=-1.0, thread_cpus=(), int32_t thread_priority=0, int32_t thread_poll=50,
                 int64_t cache_bytes=0, int32_t n_checkpoints=32, bint offload_kqv=True, bint swa_full=True,
                 bint collect_importance=False, adapters=(), ControlVector control=None):
        cdef native.EngineParams params
        cdef LoraAdapter adapter
        for item in adapters:
            adapter = item
            if adapter is None:
                raise InvalidArgument("adapters holds None, expected LoraAdapter")
            params.adapters.push_back(adapter.ptr)
        if control is not None:
            params.control = control.ptr
        for cpus in thread_cpus:
            params.threads.cpus.push_back(token_vector(cpus))
        params.threads.priority = thread_priority
        params.threads.poll = thread_poll
        params.n_ctx = n_ctx
        params.n_seq_max = n_seq_max
        params.n_batch = n_batch
        params.n_ubatch = n_ubatch
        params.n_threads = n_threads
        params.n_threads_batch = n_threads_batch
        params.type_k = type_k.encode()
        params.type_v = type_v.encode()
        params.cache_bytes = cache_bytes
        params.n_checkpoints = n_checkpoints
        params.kv_on_host = not offload_kqv
        params.swa_full = swa_full
        params.collect_importance = collect_importance
        if rope_scaling_type is not None:
            params.rope.scaling_type = <string>rope_scaling_type.encode()
        if rope_freq_base != 0.0:
            params.rope.freq_base = rope_freq_base
        if rope_freq_scale != 0.0:
            params.rope.freq_scale = rope_freq_scale
        if yarn_orig_ctx != 0:
            params.rope.original_context = yarn_orig_ctx
        if yarn_ext_factor >= 0.0:
            params.rope.yarn_ext_factor = yarn_ext_factor
        if yarn_attn_factor >= 0.0:
            params.rope.yarn_attn_factor = yarn_attn_factor
        if yarn_beta_fast >= 0.0:
            params.rope.yarn_beta_fast = yarn_beta_fast
        if yarn_beta_slow >= 0.0:
            params.rope.yarn_beta_slow = yarn_beta_slow
        model.model()
        cdef shared_ptr[const native.LoadedModel] shared = model.ptr
        self.n_vocab = model.n_vocab
        cdef shared_ptr[native.Engine] created
        with nogil:
            created = native.new_engine(shared, params)
        self.ptr = created

    # A share of the engine for the length of one call: close() from another thread does not pull it away.
    cdef shared_ptr[native.Engine] engine(self) except *:
        if not self.ptr:
            raise PyllamaError("the engine is closed")
        return self.ptr

    @property
    def n_ctx(self):
        return self.engine().get().n_ctx()

    @property
    def n_seq_max(self):
        return self.engine().get().n_seq_max()

    @property
    def n_batch(self):
        return self.engine().get().n_batch()

    @property
    def n_ubatch(self):
        return self.engine().get().n_ubatch()

    @property
    def needs_checkpoints(self):
        return bool(self.engine().get().needs_checkpoints())

    @property
    def kv_bytes(self):
        return self.engine().get().kv_bytes()

    def step(self, work, int32_t n_passes=1):
        cdef shared_ptr[native.Engine] engine = self.engine()
        cdef vector[native.SequenceWork] items
        cdef vector[vector[int32_t]] tokens
        cdef vector[native.StepOutput] outputs
        cdef vector[vector[int32_t]] drafts, ends
        cdef vector[vector[native.Proposal]] proposals
        cdef native.SequenceWork item
        cdef Sampler sampler
        cdef SyntheticAcceptance synthetic
        cdef LogitsRow row
        cdef const uint32_t[:, ::1] masks
        cdef size_t i
        kept = []  # what the spans of masks point at
        for (seq_id, item_tokens, item_sampler, n_probs, post_sampling_probs, item_row, draft, draft_proposals, end_tokens,
             rates, item_masks) in work:
            tokens.push_back(token_vector(item_tokens))
            drafts.push_back(token_vector(draft))
            ends.push_back(token_vector(end_tokens))
            proposals.push_back(proposal_vector(draft_proposals))
            synthetic = rates
            item.synthetic = synthetic.ptr.get() if synthetic is not None else NULL
            sampler = item_sampler
            item.sequence = seq_id
            item.sampler = sampler.ptr.get() if sampler is not None else NULL
            item.n_probs = n_probs
            item.post_sampling_probs = post_sampling_probs
            row = item_row
            item.logits = &row.values if row is not None else NULL
            item.masks = MaskSpan()
            if item_masks is not None:
                kept.append(np.ascontiguousarray(item_masks, dtype=np.uint32))
                masks = kept[-1]
                if masks.size == 0:
                    raise InvalidArgument("masks of 0 words; expected one bit per token in each row")
                item.masks = MaskSpan(&masks[0, 0], <size_t>masks.size)
            items.push_back(item)
        for i in range(items.size()):  # only now: growing `tokens` moved its elements
            items[i].tokens = TokenSpan(tokens[i].data(), tokens[i].size())
            items[i].draft = TokenSpan(drafts[i].data(), drafts[i].size())
            items[i].ends = TokenSpan(ends[i].data(), ends[i].size())
            items[i].proposals = native.ProposalSpan(proposals[i].data(), proposals[i].size())
        cdef native.WorkSpan view = native.WorkSpan(items.data(), items.size())
        with nogil:
            outputs = engine.get().step(view, n_passes)
        return [StepOutput(outputs[i].sequence, outputs[i].token, outputs[i].logprob, probability_list(outputs[i].top))
                for i in range(outputs.size())]

    def embed(self, work):
        cdef shared_ptr[native.Engine] engine = self.engine()
        cdef vector[native.EmbeddingWork] items
        cdef vector[vector[int32_t]] tokens
        cdef native.EmbeddingWork item
        cdef HiddenPool pool
        cdef size_t i
        pools = []  # alive until the call returns
        for seq_id, item_tokens, item_pool, ends in work:
            tokens.push_back(token_vector(item_tokens))
            pool = item_pool
            pools.append(pool)
            item.sequence = seq_id
            item.pool = pool.ptr.get() if pool is not None else NULL
            item.ends = ends
            items.push_back(item)
        for i in range(items.size()):  # only now: growing `tokens` moved its elements
            items[i].tokens = TokenSpan(tokens[i].data(), tokens[i].size())
        cdef native.EmbeddingWorkSpan view = native.EmbeddingWorkSpan(items.data(), items.size())
        with nogil:
            engine.get().embed(view)

    def decode(self, tokens, seq_ids=None, logits=None):
        cdef shared_ptr[native.Engine] engine = self.engine()
        cdef vector[int32_t] native_tokens = token_vector(tokens)
        cdef vector[int32_t] sequences
        cdef vector[uint8_t] wanted
        cdef uint8_t keep
        if seq_ids is None:
            sequences.assign(native_tokens.size(), 0)
        else:
            sequences = token_vector(seq_ids)
        if logits is None:
            wanted.assign(native_tokens.size(), 0)
            if wanted.size():
                wanted[wanted.size() - 1] = 1
        else:
            for flag in logits:
                keep = 1 if flag else 0  # typed: a conditional expression bound to push_back's reference would dangle
                wanted.push_back(keep)
        cdef TokenSpan token_view = TokenSpan(native_tokens.data(), native_tokens.size())
        cdef TokenSpan sequence_view = TokenSpan(sequences.data(), sequences.size())
        cdef FlagSpan wanted_view = FlagSpan(wanted.data(), wanted.size())
        with nogil:
            engine.get().decode(token_view, sequence_view, wanted_view)

    def logits(self):
        cdef shared_ptr[native.Engine] engine = self.engine()
        cdef Py_ssize_t rows = engine.get().logits_rows()
        result = np.empty((rows, self.n_vocab), dtype=np.float32)
        if rows:
            np.copyto(result.reshape(-1), <const float[:rows * self.n_vocab]><float*>engine.get().logits().data())
        return result

    def length(self, int32_t seq_id):
        return self.engine().get().length(seq_id)

    def can_append(self, int32_t seq_id, int32_t n_tokens):
        return self.engine().get().can_append(seq_id, n_tokens)

    def free_tokens(self):
        return self.engine().get().free_tokens()

    def draft_blocks(self, work, int32_t n_draft):
        cdef shared_ptr[native.Engine] engine = self.engine()
        cdef vector[native.BlockWork] items
        cdef native.BlockWork item
        cdef vector[native.DraftLattice] lattices
        cdef size_t i
        for seq_id, last in work:
            item.sequence = seq_id
            item.last = last
            items.push_back(item)
        with nogil:
            lattices = engine.get().draft_blocks(native.BlockWorkSpan(items.data(), items.size()), n_draft)
        found = []
        for i in range(lattices.size()):
            rows, k = lattices[i].rows, lattices[i].candidates
            tokens = np.array(lattices[i].tokens, np.int32).reshape(rows, k)
            scores = np.array(lattices[i].scores, np.float32).reshape(rows, k, k)
            confidences = np.array(lattices[i].confidences, np.float32) if lattices[i].confidences.size() else None
            found.append(BlockDraft(tokens, scores, confidences))
        return found

    def truncate(self, int32_t seq_id, int32_t length):
        self.engine().get().truncate(seq_id, length)

    def fork(self, int32_t src, int32_t dst, int32_t length):
        self.engine().get().fork(src, dst, length)

    def clear(self, int32_t seq_id):
        self.engine().get().clear(seq_id)

    def pretend(self, int32_t seq_id, int32_t n_tokens):
        self.engine().get().pretend(seq_id, n_tokens)

    @property
    def can_shift(self):
        return bool(self.engine().get().can_shift())

    def shift(self, int32_t seq_id, int32_t n_keep, int32_t n_discard):
        cdef shared_ptr[native.Engine] engine = self.engine()
        with nogil:
            engine.get().shift(seq_id, n_keep, n_discard)

    def set_adapters(self, int32_t seq_id, scales):
        cdef shared_ptr[native.Engine] engine = self.engine()
        cdef vector[float] native_scales = scales
        cdef FloatSpan view = FloatSpan(native_scales.data(), native_scales.size())
        with nogil:
            engine.get().set_adapters(seq_id, view)

    def adapters(self, int32_t seq_id):
        return tuple(self.engine().get().adapters(seq_id))

    def reuse_prefix(self, int32_t seq_id, tokens, int32_t most, scales=(), int32_t least_chunk=0):
        cdef shared_ptr[native.Engine] engine = self.engine()
        cdef vector[float] native_scales = scales
        cdef FloatSpan scale_view = FloatSpan(native_scales.data(), native_scales.size())
        cdef vector[int32_t] native_tokens = token_vector(tokens)
        cdef TokenSpan view = TokenSpan(native_tokens.data(), native_tokens.size())
        cdef native.PrefixReuse reuse
        with nogil:
            reuse = engine.get().reuse_prefix(seq_id, view, most, scale_view, least_chunk)
        return PrefixReuse(reuse.length, reuse.matched, text(reuse.source), reuse.checkpoint, text(reuse.limit),
                           reuse.moved)

    def checkpoint(self, int32_t seq_id):
        cdef shared_ptr[native.Engine] engine = self.engine()
        with nogil:
            engine.get().checkpoint(seq_id)

    def release(self, int32_t seq_id):
        cdef shared_ptr[native.Engine] engine = self.engine()
        with nogil:
            engine.get().release(seq_id)

    def cache_usage(self):
        cdef native.CacheUsage usage = self.engine().get().cache_usage()
        return CacheUsage(usage.budget, usage.used, usage.kv_bytes, usage.checkpoint_bytes, usage.n_nodes,
                          usage.n_checkpoints, usage.n_evicted)

    def save_sequence(self, int32_t seq_id):
        cdef shared_ptr[native.Engine] engine = self.engine()
        cdef vector[byte] state
        with nogil:
            state = engine.get().save_sequence(seq_id)
        return PyBytes_FromStringAndSize(<const char*>state.data(), <Py_ssize_t>state.size())

    def load_sequence(self, int32_t seq_id, state):
        cdef shared_ptr[native.Engine] engine = self.engine()
        cdef const unsigned char[::1] raw = state
        cdef ByteSpan view
        if raw.shape[0]:
            view = ByteSpan(<const byte*>&raw[0], <size_t>raw.shape[0])
        with nogil:
            engine.get().load_sequence(seq_id, view)

    def importance(self):
        cdef native.InputStatistics statistics = self.engine().get().importance()
        cdef pair[string, native.InputSums] entry
        result = {}
        for entry in statistics:
            squares = np.asarray(entry.second.squares, dtype=np.float64)
            result[entry.first.decode("utf-8", "surrogateescape")] = InputSums(
                squares.reshape(entry.second.matrices, entry.second.features), np.asarray(entry.second.n_rows))
        return result

    def _inject_fault(self, int32_t rank, int64_t at, *, double hang_seconds=0.0, stall_seconds=None):
        cdef native.InjectedFault fault
        cdef optional[double] stall
        fault.rank = rank
        fault.at = at
        fault.hang_seconds = hang_seconds
        if stall_seconds is not None:
            stall = <double>stall_seconds
        self.engine().get().inject(fault, stall)

    def close(self):
        cdef shared_ptr[native.Engine] last
        last.swap(self.ptr)
        with nogil:
            last.reset()

    def __dealloc__(self):
        self.ptr.reset()


include "_speculation.pxi"
