/* Shared parts of Ring's binding: the object, and a call of one of its methods with unpacked arguments.
 *
 *     ring_binding.c ── the table in methods.h ──▶ arguments.c ──▶ ring_methods.c, ring_records.c ──▶ python_call.c, the core
 */
#ifndef SHMB_BINDING_H
#define SHMB_BINDING_H

#include "core/ring.h"
#include "python/module.h"

struct ring_object {
    PyObject_HEAD
    struct shmb_ring ring;
    PyObject *control, *slots, *leaves, *records, *ledger; /* the maps, which must stay alive */
    PyObject *file; /* must stay alive for the name of the control file */
    int ready;
};

/* A call into the core. It releases the interpreter lock before it sleeps. */
struct python_call {
    struct shmb_call call;
    PyThreadState *saved; /* NULL: the interpreter lock is held */
};

/* python_call.c */
struct python_call shmb_python_begin(int64_t timeout_ns);
void shmb_python_may_block(struct shmb_call *call);
/* releases the interpreter lock for a copy of `bytes` */
void shmb_release_lock_for(struct python_call *python, uint64_t bytes);
void shmb_python_end(struct python_call *python);                  /* the interpreter lock is held afterwards */

#define MAX_ARGUMENTS 13
#define STACK_ADDRESSES 64 /* more addresses than these do not fit on the stack */

/* One call of a method. */
struct parsed {
    struct python_call python;
    union {
        uint64_t number; /* also an address, or a truth value */
        PyObject *object;
        double real;
    } at[MAX_ARGUMENTS];
    const unsigned char **addresses; /* one per leaf; NULL: the argument was None */
    const unsigned char *stack_addresses[STACK_ADDRESSES];
};

enum items { ANY, ROWS, RECORDS }; /* the kind of items that a method requires */

/* A method. Each letter of `arguments` describes an argument.
 *
 *     n  a number, or an address             b  a truth value
 *     k  a number modulo 2 ** 64             a  a tuple of addresses, one per leaf
 *     e  index of a registry entry           m  the same, or None
 *     s  index of a slot                     t  timeout_ns of the call
 *     r  a real number                       o  a real number or None, which is passed as NaN
 *     p  a Python object
 */
struct method {
    const char *name, *arguments;
    enum items items;
    PyObject *(*body)(struct ring_object *self, struct parsed *parsed);
};

/* arguments.c */
PyObject *shmb_call_method(PyObject *object, const struct method *method, PyObject *const *args, Py_ssize_t nargs);

/* python_call.c. shmb_build_result returns the number, or the negated status. The next three functions update the client's
 * statistics at the end of a call. shmb_build_totals returns (mass, least, max_priority, length). */
PyObject *shmb_build_result(struct parsed *parsed, int status, uint64_t number);
int shmb_record_seen(struct ring_object *self, int status);
int shmb_record_insert(struct ring_object *self, int status);
int shmb_record_sample(struct ring_object *self, int status);
PyObject *shmb_build_totals(const struct shmb_totals *totals);

/* Arguments of a method by their position. */
#define NUMBER(n) (parsed->at[n].number)
#define REAL(n) (parsed->at[n].real)
#define OBJECT(n) (parsed->at[n].object)
#define AT(type, n) ((type *)(uintptr_t)NUMBER(n))
#define CALL (&parsed->python.call)
#define BIG(number) ((unsigned long long)(number))

#endif
