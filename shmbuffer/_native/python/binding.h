/* What the parts of Ring's binding share: the object, and a call of one of its methods with the arguments unpacked.
 *
 *     ring_binding.c ── the table of methods.h ──▶ arguments.c ──▶ ring_methods.c, ring_records.c ──▶ python_call.c, the core
 */
#ifndef SHMB_BINDING_H
#define SHMB_BINDING_H

#include "core/ring.h"
#include "python/module.h"

struct ring_object {
    PyObject_HEAD
    struct shmb_ring ring;
    PyObject *control, *slots, *leaves, *records, *ledger; /* kept alive: the maps */
    PyObject *file; /* and the name of the control file */
    int ready;
};

/* A call of the core, which gives up the interpreter lock before it sleeps. */
struct python_call {
    struct shmb_call call;
    PyThreadState *saved; /* NULL: the interpreter lock is held */
};

/* python_call.c */
struct python_call shmb_python_begin(int64_t timeout_ns);
void shmb_python_may_block(struct shmb_call *call);
void shmb_release_for(struct python_call *python, uint64_t bytes); /* gives the interpreter lock up for a copy of so many */
void shmb_python_end(struct python_call *python);                  /* the interpreter lock is held afterwards */

#define MOST_ARGUMENTS 13
#define ROOM_ADDRESSES 64 /* more than these do not go onto the stack */

/* One call of a method. */
struct asked {
    struct python_call python;
    union {
        uint64_t number; /* or an address, or a truth value */
        PyObject *object;
        double real;
    } at[MOST_ARGUMENTS];
    const unsigned char **addresses; /* one a leaf; NULL: None was given */
    const unsigned char *room[ROOM_ADDRESSES];
};

enum items { ANY, ROWS, RECORDS }; /* what the items of a ring have to be */

/* A method: its arguments, a letter each.
 *
 *     n  a number, or an address             b  a truth value
 *     k  the same modulo 2 ** 64             a  a tuple of addresses, one a leaf
 *     e  of an entry of the registry         m  the same, or None
 *     s  of a slot                           t  timeout_ns, of the call
 *     r  a real number                       o  the same, or None: NaN then
 *     p  an object of Python's
 */
struct method {
    const char *name, *arguments;
    enum items items;
    PyObject *(*body)(struct ring_object *self, struct asked *asked);
};

/* arguments.c */
PyObject *shmb_ask(PyObject *object, const struct method *method, PyObject *const *args, Py_ssize_t nargs);

/* python_call.c: the number, or the status below 0; what is noted of a client at the end of a call; (mass, least,
 * max_priority, length) */
PyObject *shmb_answer(struct asked *asked, int status, uint64_t number);
int shmb_seen(struct ring_object *self, int status);
int shmb_inserted(struct ring_object *self, int status);
int shmb_sampled(struct ring_object *self, int status);
PyObject *shmb_build_totals(const struct shmb_totals *totals);

/* In a method: its arguments by their place. */
#define NUMBER(n) (asked->at[n].number)
#define REAL(n) (asked->at[n].real)
#define OBJECT(n) (asked->at[n].object)
#define AT(type, n) ((type *)(uintptr_t)NUMBER(n))
#define CALL (&asked->python.call)
#define BIG(number) ((unsigned long long)(number))

#endif
