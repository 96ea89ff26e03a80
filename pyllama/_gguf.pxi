# Part of _engine.pyx: GGUF files, their metadata, and tensor types. Documented in _engine.pyi.

cdef object type_name_of(QuantType type):
    return text(traits(type).name)


cdef dict _all_type_traits():
    cdef const native.QuantTraits* t
    cdef int32_t i
    result = {}
    for i in range(native.kQuantTypeCount):
        t = native.find_traits(i)
        if t != NULL:
            result[text(t.name)] = TypeTraits(i, t.block_values, t.block_bytes, t.is_quantized)
    return result

type_traits = _all_type_traits()
type_names = tuple(type_traits)

cdef dict _array_dtypes = {
    <int>GgufValueType.U8: "<u1", <int>GgufValueType.I8: "<i1", <int>GgufValueType.U16: "<u2", <int>GgufValueType.I16: "<i2",
    <int>GgufValueType.U32: "<u4", <int>GgufValueType.I32: "<i4", <int>GgufValueType.F32: "<f4", <int>GgufValueType.BOOL: "?",
    <int>GgufValueType.U64: "<u8", <int>GgufValueType.I64: "<i8", <int>GgufValueType.F64: "<f8",
}


cdef object python_array(const native.GgufArray& array):
    if array.element_type == GgufValueType.STRING:
        return [text(array.strings[i]) for i in range(array.strings.size())]
    dtype = _array_dtypes[<int>array.element_type]
    raw = PyBytes_FromStringAndSize(<const char*>array.bytes.data(), <Py_ssize_t>array.bytes.size())
    if dtype == "?":  # any non-zero byte is true
        return np.frombuffer(raw, dtype="u1") != 0
    return np.frombuffer(raw, dtype=dtype)


cdef object python_value(const native.GgufKeyValue& entry):
    cdef GgufValueType type = entry.type
    if type == GgufValueType.STRING:
        return text(native.value_string(entry.value))
    if type == GgufValueType.ARRAY:
        return python_array(native.value_array(entry.value))
    if type == GgufValueType.BOOL:
        return bool(native.value_bool(entry.value))
    if type == GgufValueType.F32 or type == GgufValueType.F64:
        return native.value_f64(entry.value)
    if type in (GgufValueType.U8, GgufValueType.U16, GgufValueType.U32, GgufValueType.U64):
        return native.value_u64(entry.value)
    return native.value_i64(entry.value)


cdef str value_type_text(const native.GgufKeyValue& entry):
    if entry.type == GgufValueType.ARRAY:
        return text(native.value_type_name(native.value_array(entry.value).element_type)) + "[]"
    return text(native.value_type_name(entry.type))


cdef dict python_metadata(const native.GgufFile& file):
    cdef size_t i
    result = {}
    for i in range(file.metadata().size()):
        result[text(file.metadata()[i].key)] = python_value(file.metadata()[i])
    return result


cdef QuantType quant_type(str type_name) except *:
    cdef cpp_bool known = False
    cdef QuantType type = native.quant_type_or_none(type_name.encode(), known)
    if not known:
        raise InvalidArgument(f"'{type_name}' is not a tensor type")
    return type


cdef object byte_view(data):
    # The bytes of a contiguous buffer of any element type.
    view = memoryview(data)
    if not view.c_contiguous:
        raise InvalidArgument("the data is not C-contiguous")
    return view.cast("B") if view.nbytes else np.empty(0, dtype=np.uint8)


cdef const byte* packed_values(const uint8_t[::1] raw, QuantType type, int64_t n_values) except? NULL:
    # Checks that raw holds n_values values of the type.
    name = type_name_of(type)
    cdef int64_t block_values = traits(type).block_values
    if n_values < 0 or n_values % block_values:
        raise InvalidArgument(f"{n_values} values are not a multiple of the {block_values} values of a {name} block")
    needed = n_values // block_values * traits(type).block_bytes
    if raw.shape[0] != needed:
        raise InvalidArgument(f"{n_values} values of {name} take {needed} bytes, got {raw.shape[0]}")
    return <const byte*>&raw[0] if n_values else NULL


def dequantize(str type_name not None, data, int64_t n_values):
    cdef QuantType type = quant_type(type_name)
    cdef const uint8_t[::1] raw = byte_view(data)
    cdef const byte* blocks = packed_values(raw, type, n_values)
    values = np.empty(n_values, dtype=np.float32)
    cdef float[::1] out = values
    if n_values:
        native.decode(type, blocks, &out[0], n_values)
    return values


def log_sum_exp(logits):
    cdef const float[:, ::1] rows = logits
    cdef Py_ssize_t i
    values = np.empty(rows.shape[0], dtype=np.float64)
    cdef double[::1] out = values
    if rows.shape[1] == 0:
        raise InvalidArgument("rows of logits are empty")
    with nogil:
        for i in range(rows.shape[0]):
            out[i] = native.log_sum_exp(FloatSpan(&rows[i, 0], <size_t>rows.shape[1]))
    return values


def count_non_finite(str type_name not None, data, int64_t n_values):
    cdef QuantType type = quant_type(type_name)
    cdef const uint8_t[::1] raw = byte_view(data)
    cdef const byte* blocks = packed_values(raw, type, n_values)
    cdef int64_t count
    with nogil:
        count = native.count_non_finite(type, blocks, n_values)
    return count


def encoding_needs_importance(str type_name not None):
    return bool(native.encoding_needs_importance(quant_type(type_name)))


def convert_rows(str source_type not None, data, str target_type not None, int64_t n_columns, *, importance=None,
                 int32_t n_threads=0):
    cdef QuantType source = quant_type(source_type), target = quant_type(target_type)
    cdef const uint8_t[::1] raw = byte_view(data)
    if n_columns <= 0 or n_columns % traits(source).block_values or n_columns % traits(target).block_values:
        raise InvalidArgument(f"{source_type} to {target_type}: rows of {n_columns} values, expected a multiple of "
                              f"{traits(source).block_values} and {traits(target).block_values}")
    cdef int64_t source_bytes = n_columns // traits(source).block_values * traits(source).block_bytes
    if raw.shape[0] % source_bytes:
        raise InvalidArgument(f"{raw.shape[0]} bytes are not a multiple of the {source_bytes} bytes of a row of "
                              f"{n_columns} {source_type} values")
    cdef int64_t n_rows = raw.shape[0] // source_bytes
    cdef const float[::1] weights
    cdef const float* first_weight = NULL
    if importance is not None:
        weights = np.ascontiguousarray(importance, dtype=np.float32).reshape(-1)
        if weights.shape[0] != n_columns:
            raise InvalidArgument(f"{weights.shape[0]} importance weights for rows of {n_columns} values")
        first_weight = &weights[0]
    result = np.empty(n_rows * (n_columns // traits(target).block_values * traits(target).block_bytes), dtype=np.uint8)
    cdef uint8_t[::1] out = result
    if n_rows:
        with nogil:
            native.convert_rows(source, <const byte*>&raw[0], target, n_rows, n_columns, first_weight, <byte*>&out[0],
                                n_threads)
    return result


def quantize(str type_name not None, values, importance=None, int32_t n_threads=0):
    rows = np.ascontiguousarray(values, dtype=np.float32)
    if rows.ndim != 2:
        raise InvalidArgument(f"values have {rows.ndim} dimensions, expected 2 (rows, columns)")
    return convert_rows("f32", rows, type_name, rows.shape[1], importance=importance, n_threads=n_threads)


cdef class GgufFile:
    cdef shared_ptr[const native.GgufFile] ptr
    cdef object _metadata

    def __init__(self, path, *, bint metadata_only=False, bint single_file=False):
        self.ptr = native.GgufFile.open(native_path(path), metadata_only, single_file)

    cdef const native.GgufFile* file(self) except NULL:
        if not self.ptr:
            raise PyllamaError("the GGUF file is closed")
        return self.ptr.get()

    @property
    def metadata(self):
        if self._metadata is None:
            self._metadata = python_metadata(deref(self.file()))
        return self._metadata

    @property
    def key_values(self):
        cdef const native.GgufFile* file = self.file()
        cdef size_t i
        return [KeyValue(text(file.metadata()[i].key), value_type_text(file.metadata()[i]), python_value(file.metadata()[i]))
                for i in range(file.metadata().size())]

    @property
    def version(self):
        return self.file().version()

    @property
    def alignment(self):
        return self.file().alignment()

    @property
    def tensors(self):
        cdef const native.GgufFile* file = self.file()
        cdef const native.GgufTensor* tensor
        cdef size_t i
        result = []
        for i in range(file.tensors().size()):
            tensor = &file.tensors()[i]
            shape = tuple(tensor.ne[j] for j in range(tensor.n_dims))
            result.append(TensorInfo(text(tensor.name), type_name_of(tensor.type), shape, tensor.file_offset,
                                     tensor.n_bytes, tensor.shard))
        return result

    def tensor_bytes(self, str name not None):
        cdef const native.GgufFile* file = self.file()
        cdef string native_name = name.encode("utf-8", "surrogateescape")
        cdef const native.GgufTensor* tensor = file.find_tensor(view_of(native_name))
        if tensor == NULL:
            raise InvalidArgument(f"the file has no tensor '{name}'")
        cdef ByteSpan data = file.data(deref(tensor))
        return PyBytes_FromStringAndSize(<const char*>data.data(), <Py_ssize_t>data.size())

    def close(self):
        self.ptr.reset()
