// A B+tree whose nodes are far memory (SSDAlloc, section 3.4.4): nodes of 25 keys of 64 bytes, built and used at a fraction
// of their bytes in memory. What the port of a tree takes are the lines marked "port".
//   ./btree objects|pages|malloc DIRECTORY KEYS OPERATIONS MEMORY_MIB
// Prints the time of building and of an operation (half lookups, half updates, at random), and what was written.
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <varve_alloc.h> // port

#define KEYS 25
#define KEY_BYTES 64

struct node {
    int count, is_leaf;
    char keys[KEYS][KEY_BYTES];
    union {
        struct node *children[KEYS + 1];
        uint64_t values[KEYS];
    } to;
};

static va_heap *heap;       // port
static const char *mode;    // port
static struct node *root;
static size_t nodes;

static void fail(const char *what) {
    fprintf(stderr, "%s: %s\n", what, strerror(errno));
    exit(1);
}

static struct node *new_node(int is_leaf) {
    struct node *node;
    if (strcmp(mode, "objects") == 0)
        node = va_oalloc(heap, 1, sizeof *node); // port
    else if (strcmp(mode, "pages") == 0)
        node = va_calloc(heap, 1, sizeof *node); // port
    else
        node = calloc(1, sizeof *node);
    if (node == NULL)
        fail("a node");
    node->is_leaf = is_leaf;
    nodes++;
    return node;
}

// Keys not greater than the given one.
static int find(const struct node *node, const char *key) {
    int low = 0, high = node->count;
    while (low < high) {
        int middle = (low + high) / 2;
        if (memcmp(node->keys[middle], key, KEY_BYTES) <= 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static uint64_t *look_up(const char *key) {
    struct node *node = root;
    while (!node->is_leaf)
        node = node->to.children[find(node, key)];
    int at = find(node, key);
    return at > 0 && memcmp(node->keys[at - 1], key, KEY_BYTES) == 0 ? &node->to.values[at - 1] : NULL;
}

// Parts the full child; there is room for one more.
static void split(struct node *parent, int at) {
    struct node *left = parent->to.children[at], *right = new_node(left->is_leaf);
    int kept = KEYS / 2, first = left->is_leaf ? kept : kept + 1;
    right->count = KEYS - first;
    memcpy(right->keys, left->keys[first], (size_t)right->count * KEY_BYTES);
    if (left->is_leaf)
        memcpy(right->to.values, left->to.values + first, (size_t)right->count * sizeof(uint64_t));
    else
        memcpy(right->to.children, left->to.children + first, (size_t)(right->count + 1) * sizeof(struct node *));
    left->count = kept;
    memmove(parent->keys[at + 1], parent->keys[at], (size_t)(parent->count - at) * KEY_BYTES);
    memmove(parent->to.children + at + 2, parent->to.children + at + 1,
            (size_t)(parent->count - at) * sizeof(struct node *));
    memcpy(parent->keys[at], left->keys[kept], KEY_BYTES);
    parent->to.children[at + 1] = right;
    parent->count++;
}

static void insert(const char *key, uint64_t value) {
    if (root->count == KEYS) {
        struct node *old = root;
        root = new_node(0);
        root->to.children[0] = old;
        split(root, 0);
    }
    struct node *node = root;
    while (!node->is_leaf) {
        int at = find(node, key);
        if (node->to.children[at]->count == KEYS) {
            split(node, at);
            at = find(node, key);
        }
        node = node->to.children[at];
    }
    int at = find(node, key);
    memmove(node->keys[at + 1], node->keys[at], (size_t)(node->count - at) * KEY_BYTES);
    memmove(node->to.values + at + 1, node->to.values + at, (size_t)(node->count - at) * sizeof(uint64_t));
    memcpy(node->keys[at], key, KEY_BYTES);
    node->to.values[at] = value;
    node->count++;
}

// Keys in an order that looks random, each once.
static void make_key(char *key, uint64_t number) {
    uint64_t mixed = number * 0x9e3779b97f4a7c15ull;
    memset(key, 0, KEY_BYTES);
    snprintf(key, KEY_BYTES, "%016llx of a tree", (unsigned long long)mixed);
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static uint64_t written(void) {
    va_counters counters = {0};
    if (heap != NULL && (va_flush(heap) != 0 || va_stats(heap, &counters) != 0))
        fail("counters");
    return counters.device_write_bytes;
}

int main(int count, char **arguments) {
    if (count != 6)
        return 2;
    mode = arguments[1];
    uint64_t keys = strtoull(arguments[3], NULL, 10), operations = strtoull(arguments[4], NULL, 10);
    uint64_t memory = strtoull(arguments[5], NULL, 10) << 20;
    if (strcmp(mode, "malloc") != 0 &&
        (heap = va_open(arguments[2], keys * 512 + (16 << 20), memory, NULL)) == NULL) // port
        fail("the heap");
    uint32_t *changes = calloc(keys, sizeof *changes);
    char key[KEY_BYTES];
    double begun = seconds();
    root = new_node(1);
    for (uint64_t number = 0; number < keys; number++) {
        make_key(key, number);
        insert(key, number << 32);
    }
    double built = seconds();
    uint64_t before = written(), state = 1, updates = 0;
    double start = seconds();
    for (uint64_t operation = 0; operation < operations; operation++) {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        uint64_t number = (state >> 20) % keys;
        make_key(key, number);
        uint64_t *value = look_up(key);
        if (value == NULL || *value != (number << 32 | changes[number])) {
            fprintf(stderr, "key %llu is wrong\n", (unsigned long long)number);
            return 1;
        }
        if (state >> 63) {
            *value = number << 32 | ++changes[number];
            updates++;
        }
    }
    double end = seconds();
    printf("%-8s %zu nodes of %zu bytes, %.1f MiB; built in %.2f s; an operation %.2f us, %.0f B written an update\n", mode,
           nodes, sizeof(struct node), (double)(nodes * sizeof(struct node)) / 1048576, built - begun,
           (end - start) * 1e6 / (double)operations, (double)(written() - before) / (double)(updates + !updates));
    if (heap != NULL)
        va_close(heap);
    return 0;
}
