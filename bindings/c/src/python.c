/* The interpreter in which te_core decides and records: the process's, or one that is opened. */
#define _GNU_SOURCE
#include <ctype.h>
#include <dlfcn.h>
#include <glob.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "internal.h"

typedef struct _object te_object;

/* Of the stable ABI. */
#define TE_PYTHON_DOORS(X)                                                                                             \
    X(int, Py_IsInitialized, (void))                                                                                   \
    X(void, Py_InitializeEx, (int))                                                                                    \
    X(void *, PyEval_SaveThread, (void))                                                                               \
    X(int, PyGILState_Ensure, (void))                                                                                  \
    X(void, PyGILState_Release, (int))                                                                                 \
    X(void *, PyInterpreterState_Get, (void))                                                                          \
    X(int64_t, PyInterpreterState_GetID, (void *))                                                                     \
    X(void *, PyThreadState_GetInterpreter, (void *))                                                                  \
    X(te_object *, PyImport_ImportModule, (const char *))                                                              \
    X(te_object *, PyObject_CallMethod, (te_object *, const char *, const char *, ...))                                \
    X(int, PyBytes_AsStringAndSize, (te_object *, char **, ptrdiff_t *))                                               \
    X(void, PyErr_Fetch, (te_object **, te_object **, te_object **))                                                   \
    X(te_object *, PyObject_Str, (te_object *))                                                                        \
    X(te_object *, PyUnicode_AsUTF8String, (te_object *))                                                              \
    X(void, PyErr_Clear, (void))                                                                                       \
    X(void, Py_DecRef, (te_object *))

enum { VERSION = 1 }; /* of what is asked and answered */

static struct {
    pthread_mutex_t lock; /* nobody waits for the interpreter's lock with it */
    atomic_int kind;      /* te_python_kind */
    atomic_bool ended;    /* the host's Python does */
    pid_t process;        /* in which it was found; 0: not yet */
    char *libpython, *environment;
    _Atomic(te_object *) module;
#define X(result, name, arguments) result(*name) arguments;
    TE_PYTHON_DOORS(X)
#undef X
    void *(*current)(void); /* the thread state, without a look at whether there is one; of some versions */
} python = {.lock = PTHREAD_MUTEX_INITIALIZER};

static te_status refused(const char *operation, te_python_kind kind) {
    static const char *const got[] = {"", "", "", "an interpreter that te_python forbids", "layers behind te_close",
                                      "a forked child"};
    static const char *const to_do[] = {"", "", "", "play a program, or do not forbid it",
                                        "call te_close last; programs play on", "start a process anew (exec)"};
    return te_fail(TE_UNSUPPORTED, operation, "layers, while their interpreter may be used", to_do[kind], "%s", got[kind]);
}

te_python_kind te_python_state(void) {
    const te_python_kind kind = (te_python_kind)atomic_load(&python.kind);
    const bool there = kind == TE_PYTHON_HOST || kind == TE_PYTHON_OURS;
    return there && python.process != getpid() ? TE_PYTHON_FORKED : kind;
}

void te_close(void) { atomic_store(&python.kind, TE_PYTHON_CLOSED); }

void te_python_ended(void) {
    atomic_store(&python.ended, true);
    te_close();
}

te_status te_python(const te_python_options *options) {
    const char *op = "te_python", *do_ = "begin with te_python_options o = TE_PYTHON_OPTIONS";
    if (options == NULL) return te_fail(TE_ARGUMENT, op, "options", do_, "NULL");
    if (options->size < sizeof *options || options->size > 4096)
        return te_fail(TE_ARGUMENT, op, "the size of te_python_options", do_, "size %zu", options->size);
    te_status status = TE_OK;
    (void)pthread_mutex_lock(&python.lock);
    const int kind = atomic_load(&python.kind);
    if (kind != TE_PYTHON_NONE && kind != TE_PYTHON_FORBIDDEN) {
        status = te_fail(TE_ARGUMENT, op, "te_python before the first te_layer_open", "call it earlier",
                         "an interpreter that was found already, or is closed");
    } else {
        free(python.libpython);
        free(python.environment);
        python.libpython = options->libpython == NULL ? NULL : strdup(options->libpython);
        python.environment = options->environment == NULL ? NULL : strdup(options->environment);
        atomic_store(&python.kind, options->forbidden ? TE_PYTHON_FORBIDDEN : TE_PYTHON_NONE);
    }
    (void)pthread_mutex_unlock(&python.lock);
    return status;
}

/* ------------------------------------------------------------------------------------------- where libpython is */

typedef struct {
    char packages[PATH_MAX]; /* the folder that te_core lies in; "": not known */
    char site[PATH_MAX];     /* the environment's packages */
    char home[PATH_MAX];     /* of the standard library */
    char library[PATH_MAX];
} te_places;

static bool is_file(const char *path) {
    struct stat found;
    return stat(path, &found) == 0;
}

static void cut(char *path) {
    char *slash = strrchr(path, '/');
    if (slash != NULL) *slash = '\0';
}

/* The folder that te_core lies in, above this library: of a wheel, or of a checkout. */
static void find_packages(te_places *at) {
    Dl_info info;
    char here[PATH_MAX], probe[PATH_MAX + 32];
    if (dladdr((void *)(uintptr_t)&te_python, &info) == 0 || realpath(info.dli_fname, here) == NULL) return;
    for (int i = 0; i < 5 && strrchr(here, '/') != NULL; i++) {
        cut(here);
        (void)snprintf(probe, sizeof probe, "%s/te_core/embed/__init__.py", here);
        if (!is_file(probe)) continue;
        memcpy(at->packages, here, sizeof here);
        return;
    }
}

/* Where a virtual environment's own Python lies: "home = .../bin" of its pyvenv.cfg. */
static void find_home(te_places *at, const char *environment) {
    char line[PATH_MAX + 32];
    (void)snprintf(at->home, sizeof at->home, "%s", environment);
    (void)snprintf(line, sizeof line, "%.4000s/pyvenv.cfg", environment);
    FILE *file = fopen(line, "r");
    while (file != NULL && fgets(line, (int)sizeof line, file) != NULL) {
        char *value = strchr(line, '=');
        if (strncmp(line, "home", 4) != 0 || value == NULL) continue;
        for (value++; isspace((unsigned char)*value);) value++;
        value[strcspn(value, "\r\n")] = '\0';
        (void)snprintf(at->home, sizeof at->home, "%.4000s", value);
        cut(at->home);
    }
    if (file != NULL) (void)fclose(file);
}

static void find_environment(te_places *at, const char *named) {
    char environment[PATH_MAX], pattern[PATH_MAX + 32];
    const char *version = NULL;
    glob_t found = {0};
    (void)snprintf(environment, sizeof environment, "%.4000s", named);
    struct stat what;
    if (stat(environment, &what) == 0 && S_ISREG(what.st_mode)) { /* its python */
        cut(environment);
        cut(environment);
    }
    (void)snprintf(pattern, sizeof pattern, "%s/lib/python3.*", environment);
    if (glob(pattern, GLOB_ONLYDIR, NULL, &found) == 0) {
        const char *last = found.gl_pathv[found.gl_pathc - 1];
        version = strrchr(last, '/') + 1;
        (void)snprintf(at->site, sizeof at->site, "%.4000s/site-packages", last);
        find_home(at, environment);
        (void)snprintf(at->library, sizeof at->library, "%.3000s/lib/lib%.64s.so.1.0", at->home, version);
        if (!is_file(at->library)) (void)snprintf(at->library, sizeof at->library, "lib%.64s.so.1.0", version);
    }
    globfree(&found);
}

static te_status open_library(te_places *at) {
    const char *to_do = "name it by te_python, or a Python with te_core and a shared library by TE_CORE_PYTHON";
    const char *environment = python.environment != NULL ? python.environment : getenv("TE_CORE_PYTHON");
    char above[PATH_MAX];
    if (environment == NULL && strstr(at->packages, "-packages") != NULL) { /* .../lib/python3.x/site-packages */
        memcpy(above, at->packages, sizeof above);
        for (int i = 0; i < 3; i++) cut(above);
        environment = above;
    }
    if (environment != NULL) find_environment(at, environment);
    if (python.libpython != NULL) (void)snprintf(at->library, sizeof at->library, "%.4000s", python.libpython);
    if (at->library[0] == '\0')
        return te_fail(TE_LIBRARY, "te_layer_open", "libpython3.x.so of Python 3.10 or later", to_do,
                       "%.200s, which is no environment of Python's", environment == NULL ? "nothing" : environment);
    if (dlopen(at->library, RTLD_NOW | RTLD_GLOBAL) == NULL)
        return te_fail(TE_LIBRARY, "te_layer_open", "libpython3.x.so of Python 3.10 or later", to_do, "%.280s", dlerror());
    return TE_OK;
}

static te_status find_doors(void) {
    const char *missing = NULL;
#define X(result, name, arguments)                                                                                     \
    {                                                                                                                  \
        void *found = dlsym(RTLD_DEFAULT, #name);                                                                      \
        memcpy(&python.name, &found, sizeof found);                                                                    \
        if (found == NULL) missing = #name;                                                                            \
    }
    TE_PYTHON_DOORS(X)
#undef X
    void *found = dlsym(RTLD_DEFAULT, "PyThreadState_GetUnchecked");
    if (found == NULL) found = dlsym(RTLD_DEFAULT, "_PyThreadState_UncheckedGet");
    memcpy(&python.current, &found, sizeof found);
    if (missing == NULL) return TE_OK;
    return te_fail(TE_LIBRARY, "te_layer_open", "a Python from 3.10 on", "name another one", "no %s", missing);
}

/* A variable for as long as the interpreter starts; gives what was there. */
static char *set_for_now(const char *name, const char *value) {
    const char *was = getenv(name);
    char *kept = was == NULL ? NULL : strdup(was);
    if (value[0] != '\0') (void)setenv(name, value, 1);
    return kept;
}

static void put_back(const char *name, char *kept) {
    if (kept == NULL)
        (void)unsetenv(name);
    else
        (void)setenv(name, kept, 1);
    free(kept);
}

static void start(te_places *at) {
    char paths[3 * PATH_MAX], probe[PATH_MAX + 32];
    const char *old = getenv("PYTHONPATH"), *version = strstr(at->site, "/python3.");
    (void)snprintf(probe, sizeof probe, "%.3000s/lib%.*s/os.py", at->home, version == NULL ? 0 : (int)strcspn(version + 1, "/") + 1,
                   version == NULL ? "" : version);
    (void)snprintf(paths, sizeof paths, "%s%s%s%s%.4000s", at->site, at->site[0] ? ":" : "", at->packages, old ? ":" : "",
                   old == NULL ? "" : old);
    char *home = set_for_now("PYTHONHOME", is_file(probe) ? at->home : "");
    char *path = set_for_now("PYTHONPATH", paths);
    python.Py_InitializeEx(0); /* without signal handlers */
    put_back("PYTHONHOME", home);
    put_back("PYTHONPATH", path);
    (void)python.PyEval_SaveThread(); /* whichever thread calls next takes the lock */
}

/* Find the interpreter, or start one. */
static te_status find(void) {
    te_status status = TE_OK;
    (void)pthread_mutex_lock(&python.lock);
    if (atomic_load(&python.kind) == TE_PYTHON_NONE) {
        te_places *at = calloc(1, sizeof *at);
        const bool there = dlsym(RTLD_DEFAULT, "Py_IsInitialized") != NULL;
        if (at == NULL) status = te_fail(TE_MEMORY, "te_layer_open", "enough memory", "free some", "too little");
        if (status == TE_OK) find_packages(at);
        if (status == TE_OK && !there) status = open_library(at);
        if (status == TE_OK) status = find_doors();
        if (status == TE_OK) {
            const bool host = python.Py_IsInitialized() != 0;
            if (!host) start(at);
            python.process = getpid();
            atomic_store(&python.kind, host ? TE_PYTHON_HOST : TE_PYTHON_OURS);
        }
        free(at);
    }
    (void)pthread_mutex_unlock(&python.lock);
    return status;
}

/* ------------------------------------------------------------------------------------------------------ asking it */

static te_status sub_interpreter(const char *operation) {
    return te_fail(TE_UNSUPPORTED, operation, "the main interpreter of a process", "call it from a thread of that one",
                   "a call from a sub-interpreter, which NumPy does not run in");
}

/* Take the interpreter's lock. */
static te_status enter(const char *operation, bool behind_close, int *state) {
    const te_python_kind before = te_python_state();
    if (before >= TE_PYTHON_FORBIDDEN && !behind_close) return refused(operation, before);
    if (before == TE_PYTHON_NONE && find() != TE_OK) return te_error()->status;
    void *now = python.current == NULL ? NULL : python.current();
    if (now != NULL && python.PyInterpreterState_GetID(python.PyThreadState_GetInterpreter(now)) != 0)
        return sub_interpreter(operation);
    if (!python.Py_IsInitialized()) return refused(operation, TE_PYTHON_CLOSED);
    *state = python.PyGILState_Ensure();
    if (python.PyInterpreterState_GetID(python.PyInterpreterState_Get()) == 0) return TE_OK;
    python.PyGILState_Release(*state);
    return sub_interpreter(operation);
}

/* The exception that is set, as an error. */
static te_status raised(const char *operation, const char *what) {
    te_object *parts[3] = {NULL, NULL, NULL}, *text = NULL, *bytes = NULL;
    char *said = NULL;
    ptrdiff_t length;
    python.PyErr_Fetch(&parts[0], &parts[1], &parts[2]);
    if (parts[1] != NULL) text = python.PyObject_Str(parts[1]);
    if (text != NULL) bytes = python.PyUnicode_AsUTF8String(text);
    if (bytes != NULL) (void)python.PyBytes_AsStringAndSize(bytes, &said, &length);
    const te_status status = te_fail(TE_LIBRARY, operation, "a Python that has te_core, NumPy and ml_dtypes",
                                     "name one by te_python or TE_CORE_PYTHON", "%.100s: %.200s", what, said ? said : "?");
    te_object *all[] = {parts[0], parts[1], parts[2], text, bytes};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i] != NULL) python.Py_DecRef(all[i]);
    python.PyErr_Clear();
    return status;
}

/* te_core.embed; the folder that this library lies in is tried last. */
static te_status import(const char *operation, te_object **module) {
    *module = atomic_load(&python.module);
    if (*module != NULL) return TE_OK;
    *module = python.PyImport_ImportModule("te_core.embed");
    te_places *at = *module == NULL ? calloc(1, sizeof *at) : NULL;
    if (at != NULL) find_packages(at);
    if (at != NULL && at->packages[0]) {
        te_object *type, *value, *trace;
        python.PyErr_Fetch(&type, &value, &trace);
        te_object *site = python.PyImport_ImportModule("site");
        te_object *added = site ? python.PyObject_CallMethod(site, "addsitedir", "s", at->packages) : NULL;
        if (added != NULL) *module = python.PyImport_ImportModule("te_core.embed");
        te_object *all[] = {type, value, trace, site, added};
        for (size_t i = 0; i < sizeof all / sizeof *all; i++)
            if (all[i] != NULL) python.Py_DecRef(all[i]);
    }
    free(at);
    if (*module == NULL) return raised(operation, "import te_core.embed");
    atomic_store(&python.module, *module); /* never let go of: the interpreter is never finalized */
    return TE_OK;
}

/* What was answered: three numbers (status, words, texts), words, texts, bytes; of an error its four parts. */
static te_status read_answer(const char *operation, const char *content, ptrdiff_t size, te_answer *answer) {
    int64_t head[3];
    memcpy(head, content, sizeof head);
    answer->content = malloc((size_t)size + 1);
    if (answer->content == NULL) return te_fail(TE_MEMORY, operation, "enough memory", "free some", "%td bytes", size);
    memcpy(answer->content, content, (size_t)size);
    answer->content[size] = '\0';
    answer->words = (const int64_t *)(const void *)(answer->content + sizeof head);
    answer->word_count = (size_t)head[1];
    answer->text_count = (size_t)head[2];
    answer->texts = answer->content + sizeof head + 8 * answer->word_count;
    const char *end = answer->texts;
    const char *texts[4] = {"", "", "", ""};
    for (size_t i = 0; i < answer->text_count; i++) {
        if (i < 4) texts[i] = end;
        end += strlen(end) + 1;
    }
    answer->bytes = end;
    answer->size = (size_t)(answer->content + size - end);
    if (head[0] == TE_OK) return TE_OK;
    const te_status status = te_fail((te_status)head[0], texts[0], texts[2], texts[3], "%s", texts[1]);
    free(answer->content);
    answer->content = NULL;
    return status;
}

te_status te_python_ask(const char *operation, const char *what, const uint64_t w[ASKED], te_answer *answer) {
    int state = 0;
    char *content = NULL;
    ptrdiff_t size = 0;
    te_object *module, *bytes = NULL;
    memset(answer, 0, sizeof *answer);
    te_status status = enter(operation, strcmp(what, "drop") == 0, &state);
    if (status != TE_OK) return status;
    status = import(operation, &module);
    if (status == TE_OK) {
        typedef unsigned long long u;
        bytes = python.PyObject_CallMethod(module, "ask", "isKKKKKKKK", (int)VERSION, what, (u)w[0], (u)w[1], (u)w[2], (u)w[3],
                                           (u)w[4], (u)w[5], (u)w[6], (u)w[7]);
        if (bytes == NULL || python.PyBytes_AsStringAndSize(bytes, &content, &size) != 0) status = raised(operation, what);
    }
    if (status == TE_OK) status = read_answer(operation, content, size, answer);
    if (bytes != NULL) python.Py_DecRef(bytes);
    python.PyGILState_Release(state);
    return status;
}

void te_python_drop(uint64_t number) {
    te_answer answer;
    if (!number || python.process != getpid() || atomic_load(&python.ended)) return;
    const uint64_t asked[ASKED] = {number};
    if (te_python_ask("te_layer_free", "drop", asked, &answer) == TE_OK) free(answer.content);
}
