/* Launches a kernel of any signature (kbx_env/sandbox/launcher.py).

   launch(types, grid_x, grid_y, grid_z, stream, function, cooperative, dependent, global_scratch, profile_scratch,
          (warps, cluster, shared_bytes), metadata, enter_hook, exit_hook, *arguments)

   types has one letter for each argument: P for a pointer; x for a constant, which the kernel does not take; e for fp16,
   t for bf16, f for fp32, d for fp64; for an integer the letter of Python's PyArg_Parse, b h i L or B H I K. The letters
   of a tuple stand in brackets. dependent: the kernel may begin before the one before it has ended (programmatic dependent
   launch). cluster: thread blocks of a cluster.

   Arguments, hooks and errors are treated as by the launchers that Triton 3.6 builds, but an argument that does not fit
   into its type always ends the launch. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <string.h>

#include "cuda.h"

enum {
  TYPES, GRID_X, GRID_Y, GRID_Z, STREAM, FUNCTION, COOPERATIVE, DEPENDENT, GLOBAL_SCRATCH, PROFILE_SCRATCH,
  SIZES, METADATA, ENTER_HOOK, EXIT_HOOK, FIXED
};

#define MOST_VALUES 514 /* MOST_ARGUMENTS of launcher.py, and both scratch buffers */
#define LARGEST_PORTABLE_CLUSTER 8

typedef union {
  CUdeviceptr pointer;
  uint16_t half;
  float single;
  double whole;
  uint64_t bits;
} Value;

typedef struct {
  Value values[MOST_VALUES];
  int count;
  int seen; /* arguments and items read so far, constants included */
} Parameters;

static PyObject *data_ptr;

static bool failed(CUresult code) {
  if (code == CUDA_SUCCESS) return false;
  const char *text = NULL;
  cuGetErrorString(code, &text);
  PyErr_Format(PyExc_RuntimeError, "Triton Error [CUDA]: %s", text ? text : "unknown error");
  return true;
}

static bool has_context(void) {
  CUcontext context = NULL;
  CUdevice device;
  if (failed(cuCtxGetCurrent(&context))) return false;
  if (context) return true;
  return !failed(cuDeviceGet(&device, 0)) && !failed(cuDevicePrimaryCtxRetain(&context, device)) &&
         !failed(cuCtxSetCurrent(context));
}

/* An address, None, or an object with the method data_ptr. */
static bool read_pointer(PyObject *given, int index, CUdeviceptr *out) {
  *out = 0;
  if (given == Py_None) return true;
  if (PyLong_Check(given)) {
    *out = PyLong_AsUnsignedLongLong(given);
    return !PyErr_Occurred();
  }
  PyObject *address = PyObject_CallMethodNoArgs(given, data_ptr);
  if (!address) {
    PyErr_SetString(PyExc_TypeError, "Pointer argument must be either uint64 or have data_ptr method");
    return false;
  }
  if (!PyLong_Check(address)) {
    Py_DECREF(address);
    PyErr_SetString(PyExc_TypeError, "data_ptr method of Pointer object must return 64-bit int");
    return false;
  }
  *out = PyLong_AsUnsignedLongLong(address);
  Py_DECREF(address);
  if (PyErr_Occurred()) return false;
  if (!*out) return true;
  CUdeviceptr on_device = 0;
  CUresult code = cuPointerGetAttribute(&on_device, CU_POINTER_ATTRIBUTE_DEVICE_POINTER, *out);
  if (code == CUDA_ERROR_INVALID_VALUE) {
    PyErr_Format(PyExc_ValueError, "Pointer argument (at %d) cannot be accessed from Triton (cpu tensor?)", index);
    return false;
  }
  *out = on_device;
  return !failed(code);
}

static bool read_value(char type, PyObject *given, int index, Value *out) {
  const char format[2] = {type, 0};
  double number;
  out->bits = 0;
  switch (type) {
    case 'P':
      return read_pointer(given, index, &out->pointer);
    case 'e':
    case 't':
    case 'f':
    case 'd':
      if (!PyArg_Parse(given, "d", &number)) return false;
      if (type == 'd') {
        out->whole = number;
      } else if (type == 'e') {
        return PyFloat_Pack2(number, (char *)&out->half, 1) == 0;
      } else {
        out->single = (float)number;
        if (type == 't') out->bits >>= 16; /* bf16 is the upper half of a float, cut off */
      }
      return true;
    case 'b': case 'h': case 'i': case 'L': case 'B': case 'H': case 'I': case 'K':
      return PyArg_Parse(given, format, out);
  }
  PyErr_Format(PyExc_ValueError, "no type of an argument: %c", type);
  return false;
}

/* Read arguments up to the end of the types, or the items of a tuple up to its closing bracket. */
static bool read_values(const char **types, char end, PyObject *const *given, Py_ssize_t count, Parameters *out) {
  Py_ssize_t i = 0;
  for (; i < count && **types && **types != ')'; i++, (*types)++) {
    if (**types == '(') {
      if (!PyTuple_Check(given[i])) {
        PyErr_Format(PyExc_TypeError, "argument %d must be a tuple", out->seen);
        return false;
      }
      (*types)++;
      if (Py_EnterRecursiveCall(" while the arguments of a kernel are read")) return false;
      bool read = read_values(types, ')', PySequence_Fast_ITEMS(given[i]), PyTuple_GET_SIZE(given[i]), out);
      Py_LeaveRecursiveCall();
      if (!read) return false;
      continue;
    }
    if (out->count == MOST_VALUES - 2) {
      PyErr_SetString(PyExc_TypeError, "a kernel with too many arguments");
      return false;
    }
    if (**types != 'x') {
      if (!read_value(**types, given[i], out->seen, &out->values[out->count])) return false;
      out->count++;
    }
    out->seen++;
  }
  if (i == count && **types == end) return true;
  PyErr_Format(PyExc_TypeError, "the kernel takes another number of arguments than the %zd that are given", count);
  return false;
}

static bool call_hook(PyObject *hook, PyObject *metadata) {
  if (hook == Py_None) return true;
  PyObject *answer = PyObject_CallOneArg(hook, metadata);
  Py_XDECREF(answer);
  return answer != NULL;
}

static CUresult enqueue(CUlaunchConfig *config, CUfunction function, void **parameters, int cluster, int cooperative, int dependent) {
  CUlaunchAttribute attributes[4];
  memset(attributes, 0, sizeof attributes);
  config->attrs = attributes;
  if (dependent) {
    attributes[config->numAttrs].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attributes[config->numAttrs++].value.programmaticStreamSerializationAllowed = 1;
  }
  if (cooperative) {
    attributes[config->numAttrs].id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
    attributes[config->numAttrs++].value.cooperative = 1;
  }
  if (cluster != 1) {
    attributes[config->numAttrs].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    attributes[config->numAttrs].value.clusterDim.x = cluster;
    attributes[config->numAttrs].value.clusterDim.y = 1;
    attributes[config->numAttrs++].value.clusterDim.z = 1;
    attributes[config->numAttrs].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE;
    attributes[config->numAttrs++].value.clusterSchedulingPolicyPreference = CU_CLUSTER_SCHEDULING_POLICY_SPREAD;
  }
  if (cluster > LARGEST_PORTABLE_CLUSTER) {
    CUresult code = cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1);
    if (code != CUDA_SUCCESS) return code;
  }
  return cuLaunchKernelEx(config, function, parameters, NULL);
}

static bool run(PyObject *const *args, Py_ssize_t count) {
  int x, y, z, warps, cluster, shared, cooperative, dependent;
  unsigned long long stream, function;
  if (!has_context() || !PyArg_Parse(args[GRID_X], "i", &x) || !PyArg_Parse(args[GRID_Y], "i", &y) ||
      !PyArg_Parse(args[GRID_Z], "i", &z) || !PyArg_Parse(args[STREAM], "K", &stream) ||
      !PyArg_Parse(args[FUNCTION], "K", &function) || !PyArg_Parse(args[COOPERATIVE], "p", &cooperative) ||
      !PyArg_Parse(args[DEPENDENT], "p", &dependent) || !PyArg_Parse(args[SIZES], "(iii)", &warps, &cluster, &shared))
    return false;

  Parameters given;
  void *parameters[MOST_VALUES];
  const char *types = PyBytes_AS_STRING(args[TYPES]);
  given.count = given.seen = 0;
  if (!read_values(&types, 0, args + FIXED, count - FIXED, &given)) return false;
  /* Every kernel takes both scratch buffers. */
  if (!read_pointer(args[GLOBAL_SCRATCH], -1, &given.values[given.count++].pointer)) return false;
  if (!read_pointer(args[PROFILE_SCRATCH], -1, &given.values[given.count++].pointer)) return false;
  for (int i = 0; i < given.count; i++) parameters[i] = &given.values[i];

  if (!call_hook(args[ENTER_HOOK], args[METADATA])) return false;
  if (x > 0 && y > 0 && z > 0) {
    CUlaunchConfig config;
    CUresult code;
    memset(&config, 0, sizeof config);
    config.gridDimX = (unsigned)x * cluster, config.gridDimY = y, config.gridDimZ = z;
    config.blockDimX = 32 * warps, config.blockDimY = 1, config.blockDimZ = 1;
    config.sharedMemBytes = shared;
    config.hStream = (CUstream)(uintptr_t)stream;
    Py_BEGIN_ALLOW_THREADS;
    code = enqueue(&config, (CUfunction)(uintptr_t)function, parameters, cluster, cooperative, dependent);
    Py_END_ALLOW_THREADS;
    if (failed(code)) return false;
  }
  return call_hook(args[EXIT_HOOK], args[METADATA]);
}

static PyObject *launch(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  if (count < FIXED || !PyBytes_Check(args[TYPES])) return PyErr_Format(PyExc_TypeError, "launch takes %d arguments and more", FIXED);
  Py_INCREF(args[TYPES]); /* what an argument's data_ptr runs may let go of it */
  bool launched = run(args, count);
  Py_DECREF(args[TYPES]);
  if (!launched) return NULL;
  Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"launch", (PyCFunction)(void (*)(void))launch, METH_FASTCALL, "Launch a kernel of any signature."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "kbx_launcher", NULL, -1, methods};

PyMODINIT_FUNC PyInit_kbx_launcher(void) {
  data_ptr = PyUnicode_InternFromString("data_ptr");
  return data_ptr ? PyModule_Create(&module) : NULL;
}
