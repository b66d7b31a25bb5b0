/* Unpacks the arguments of Ring's methods according to the letters of their rows. Addresses are passed as integers.
 * The caller has validated the memory, and keeps it alive. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "python/binding.h"

static bool number(PyObject *object, uint64_t *out) {
    *out = PyLong_AsUnsignedLongLong(object);
    return *out != UINT64_MAX || !PyErr_Occurred();
}

static bool number_below(PyObject *object, uint64_t *out, uint64_t bound, const char *name, const char *noun) {
    if (!number(object, out)) return false;
    if (*out < bound) return true;
    return PyErr_Format(PyExc_IndexError, "%s: there is no %s %llu. Pass a number below %llu.", name, noun, (unsigned long long)*out, (unsigned long long)bound), false;
}

/* A tuple with one address per leaf. It is not from PyMem_Malloc, because it may be freed without the interpreter
 * lock. */
static bool addresses(const struct ring_object *self, PyObject *tuple, struct parsed *parsed) {
    unsigned leaves = self->ring.n_leaves;
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != (Py_ssize_t)leaves)
        return PyErr_Format(PyExc_TypeError, "This method needs a tuple of %u addresses, one for each leaf.", leaves), false;
    parsed->addresses = leaves <= STACK_ADDRESSES ? parsed->stack_addresses : malloc(leaves * sizeof *parsed->addresses);
    if (parsed->addresses == NULL) return PyErr_NoMemory(), false;
    for (unsigned i = 0; i < leaves; i++) {
        uint64_t address;
        if (!number(PyTuple_GetItem(tuple, i), &address)) return false;
        parsed->addresses[i] = (const unsigned char *)(uintptr_t)address;
    }
    return true;
}

static bool unpack(const struct ring_object *self, const struct method *method, PyObject *const *args, struct parsed *parsed) {
    uint64_t *to;
    int truth;
    for (unsigned i = 0; method->arguments[i]; i++) {
        to = &parsed->at[i].number;
        switch (method->arguments[i]) {
        case 'n':
            if (!number(args[i], to)) return false;
            break;
        case 'k':
            *to = PyLong_AsUnsignedLongLongMask(args[i]);
            if (*to == UINT64_MAX && PyErr_Occurred()) return false;
            break;
        case 'e':
            if (!number_below(args[i], to, SHMB_ENTRIES, method->name, "entry")) return false;
            break;
        case 's':
            if (!number_below(args[i], to, self->ring.capacity, method->name, "slot")) return false;
            break;
        case 'o':
        case 'r': {
            bool optional = method->arguments[i] == 'o', none = optional && args[i] == Py_None;
            double real = none ? NAN : PyFloat_AsDouble(args[i]);
            if (real == -1 && PyErr_Occurred()) return false;
            /* a NaN of the caller, which the core refuses as infinite */
            parsed->at[i].real = optional && !none && isnan(real) ? INFINITY : real;
            break;
        }
        case 'b':
            if ((truth = PyObject_IsTrue(args[i])) < 0) return false;
            *to = (uint64_t)truth;
            break;
        case 'p':
            parsed->at[i].object = args[i];
            break;
        case 'm':
            if (args[i] == Py_None) break;
            /* fall through */
        case 'a':
            if (!addresses(self, args[i], parsed)) return false;
            break;
        case 't':
            parsed->python.call.timeout_ns = PyLong_AsLongLong(args[i]);
            if (parsed->python.call.timeout_ns == -1 && PyErr_Occurred()) return false;
            break;
        }
    }
    return true;
}

static bool check_call(const struct ring_object *self, const struct method *method, Py_ssize_t count) {
    Py_ssize_t wanted = (Py_ssize_t)strlen(method->arguments);
    bool records = self->ring.bytes != NULL;
    if (count != wanted)
        PyErr_Format(PyExc_TypeError, "%s() takes %zd arguments, but %zd were given.", method->name, wanted, count);
    else if (method->items == ROWS && records)
        PyErr_Format(PyExc_TypeError, "%s() is for rows of leaves, but the items of this ring are records. Use the method for records.", method->name);
    else if (method->items == RECORDS && !records)
        PyErr_Format(PyExc_TypeError, "%s() is for records, but the items of this ring are rows of leaves. Use the method for rows.", method->name);
    else
        return true;
    return false;
}

PyObject *shmb_call_method(PyObject *object, const struct method *method, PyObject *const *args, Py_ssize_t nargs) {
    struct ring_object *self = (struct ring_object *)object;
    struct parsed parsed;
    if (!check_call(self, method, nargs)) return NULL;
    parsed.python = shmb_python_begin(0);
    parsed.addresses = NULL;
    PyObject *answer = unpack(self, method, args, &parsed) ? method->body(self, &parsed) : NULL;
    if (parsed.addresses != parsed.stack_addresses) free(parsed.addresses);
    return answer;
}
