# What a model takes of devices. Documented in _engine.pyi.

RankNeeds = namedtuple("RankNeeds", "device weights kv states compute")


cdef class MemoryNeeds:
    cdef shared_ptr[native.MemoryNeeds] ptr

    def __init__(self, path, *, bint load_mtp=False, mtp_file=None, drafter=None, kv_overrides=None, str isa="auto"):
        cdef native.ModelParams params
        params.path = native_path(path)
        params.load_mtp = load_mtp
        if mtp_file is not None:
            params.mtp_file = native_path(mtp_file)
        if drafter is not None:
            params.drafter = native_path(drafter)
        params.isa = isa.encode()
        add_overrides(params.kv_overrides, kv_overrides or {})
        cdef shared_ptr[native.MemoryNeeds] opened
        with nogil:
            opened = native.open_memory_needs(params)
        self.ptr = opened

    @property
    def n_layer(self):
        return self.ptr.get().hyperparameters().layers

    @property
    def n_experts(self):
        return self.ptr.get().hyperparameters().experts

    @property
    def n_ctx_train(self):
        return self.ptr.get().hyperparameters().context_length

    def of(self, *, int32_t n_ctx, int32_t n_seq_max=1, int32_t n_ubatch=512, str type_k="f16", str type_v="f16",
           bint swa_full=True, devices=(), str split_mode="layer", tensor_split=(), int32_t main_gpu=0, tensor_overrides=(),
           device_layers=None):
        cdef native.EngineParams engine
        cdef native.PlacementParams placed = placement_params(
            devices, split_mode, tensor_split, main_gpu, tensor_overrides, device_layers)
        engine.n_ctx = n_ctx
        engine.n_seq_max = n_seq_max
        engine.n_batch = engine.n_ubatch = n_ubatch
        engine.type_k = type_k.encode()
        engine.type_v = type_v.encode()
        engine.swa_full = swa_full
        cdef vector[native.RankNeeds] needs
        with nogil:
            needs = self.ptr.get().of(placed, engine)
        return tuple(RankNeeds(need.device.decode(), need.weights, need.kv, need.states, need.compute) for need in needs)
