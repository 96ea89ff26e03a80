// C++ error -> Python class: the one table. Used as Cython's exception handler, with the GIL held.
#pragma once

#include <Python.h>

#include <cstring>
#include <exception>
#include <new>

#include "base/error.h"

namespace v100 {

inline PyObject* python_error_class(const char* name) {
  PyObject* module = PyImport_ImportModule("pyllama.errors");
  if (module == nullptr) return nullptr;
  PyObject* error_class = PyObject_GetAttrString(module, name);
  Py_DECREF(module);
  return error_class;
}

inline void raise_python(const char* class_name, const char* message) {
  PyObject* error_class = python_error_class(class_name);
  if (error_class == nullptr) return;  // the import's own error is set
  // A message may quote names from a file, which are any bytes.
  PyObject* text = PyUnicode_DecodeUTF8(message, static_cast<Py_ssize_t>(std::strlen(message)), "backslashreplace");
  if (text != nullptr) PyErr_SetObject(error_class, text);
  Py_XDECREF(text);
  Py_DECREF(error_class);
}

inline void translate_error() {
  try {
    throw;
  } catch (const ContextFull& error) {
    PyObject* error_class = python_error_class("ContextFull");
    if (error_class == nullptr) return;
    PyObject* value = PyObject_CallFunction(error_class, "si", error.what(), static_cast<int>(error.sequence()));
    if (value != nullptr) PyErr_SetObject(error_class, value);
    Py_XDECREF(value);
    Py_DECREF(error_class);
  } catch (const GgufError& error) {
    raise_python("GgufError", error.what());
  } catch (const ModelError& error) {
    raise_python("ModelError", error.what());
  } catch (const DeviceError& error) {
    raise_python("DeviceError", error.what());
  } catch (const OutOfMemory& error) {
    raise_python("OutOfMemory", error.what());
  } catch (const InvalidArgument& error) {
    raise_python("InvalidArgument", error.what());
  } catch (const std::bad_alloc&) {
    raise_python("OutOfMemory", "out of host memory");
  } catch (const std::exception& error) {
    raise_python("PyllamaError", error.what());
  }
}

}  // namespace v100
