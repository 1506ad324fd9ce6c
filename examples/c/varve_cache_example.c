/* A tour of varve_cache.h: a store on two files, puts of all kinds, ranges, streams, purges, counters, errors.
 *
 *   cc varve_cache_example.c $(pkg-config --cflags --libs varve) -lpthread -o varve_cache_example
 *   ./varve_cache_example DIR
 */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <varve_cache.h>

#define CHECK(what)                                                                   \
    do {                                                                              \
        if (!(what)) {                                                                \
            fprintf(stderr, "line %d: %s: %s\n", __LINE__, #what, strerror(errno));   \
            exit(1);                                                                  \
        }                                                                             \
    } while (0)

/* A call that must fail with this errno. */
#define FAILS(what, wanted)  \
    do {                     \
        errno = 0;           \
        CHECK((what) == -1 && errno == (wanted)); \
    } while (0)

/* The same for calls that return a handle. */
#define NONE(what, wanted)   \
    do {                     \
        errno = 0;           \
        CHECK((what) == NULL && errno == (wanted)); \
    } while (0)

static int put(varve_cache *cache, const char *key, const char *body, const varve_cache_attrs *attrs)
{
    return varve_cache_put(cache, key, strlen(key), body, strlen(body), attrs);
}

static varve_cache_hit *get(varve_cache *cache, const char *key)
{
    return varve_cache_get(cache, key, strlen(key));
}

static void objects(varve_cache *cache)
{
    const char *tags[] = { "docs", "old" };
    varve_cache_attrs attrs = { .meta = "type: text", .meta_len = 10, .tags = tags, .tag_count = 2, .host = "example.org" };
    varve_cache_info info;
    varve_cache_hit *hit;
    char text[32] = "";
    uint64_t whole = 0;

    CHECK(put(cache, "http://example.org/a", "hello, world", &attrs) == 0);
    CHECK((hit = get(cache, "http://example.org/a")) != NULL);
    CHECK(varve_cache_hit_info(hit, &info) == 0 && info.body_len == 12 && info.meta_len == 10 && info.expires_s == 0);
    CHECK(varve_cache_hit_meta(hit, text, 4) == 10 && memcmp(text, "type", 4) == 0);
    CHECK(varve_cache_read(hit, text, sizeof text, 7) == 5 && memcmp(text, "world", 5) == 0);
    CHECK(varve_cache_read(hit, text, sizeof text, 12) == 0);
    CHECK(varve_cache_release(hit) == 0);
    FAILS(varve_cache_release(hit), EBADF);
    FAILS(varve_cache_read(hit, text, 1, 0), EBADF);
    CHECK(varve_cache_get_range(cache, "http://example.org/a", 20, text, 5, 0, &whole) == 5 && whole == 12);
    CHECK(memcmp(text, "hello", 5) == 0);
    NONE(get(cache, "http://example.org/b"), ENOENT);
    FAILS(varve_cache_get_range(cache, "b", 1, text, 5, 0, NULL), ENOENT);

    /* Whoever was put before its end is not served after it. */
    attrs.expires_s = (uint64_t)time(NULL) - 1;
    CHECK(put(cache, "http://example.org/gone", "late", &attrs) == 0);
    NONE(get(cache, "http://example.org/gone"), ENOENT);

    CHECK(varve_cache_delete(cache, "http://example.org/a", 20) == 0);
    NONE(get(cache, "http://example.org/a"), ENOENT);
}

static void purges(varve_cache *cache)
{
    const char *docs[] = { "docs" };
    varve_cache_attrs tagged = { .tags = docs, .tag_count = 1 }, hosted = { .host = "example.net" };

    CHECK(put(cache, "p/1", "one", &tagged) == 0 && put(cache, "p/2", "two", &hosted) == 0);
    CHECK(put(cache, "p/3/x", "three", NULL) == 0 && put(cache, "q", "four", NULL) == 0 && put(cache, "r", "", NULL) == 0);
    CHECK(varve_cache_purge(cache, VARVE_CACHE_TAG, "docs", 4) == 0);
    NONE(get(cache, "p/1"), ENOENT);
    CHECK(varve_cache_purge(cache, VARVE_CACHE_HOST, "example.net", 11) == 0);
    NONE(get(cache, "p/2"), ENOENT);
    CHECK(varve_cache_purge(cache, VARVE_CACHE_PREFIX, "p/3", 3) == 0);
    NONE(get(cache, "p/3/x"), ENOENT);
    CHECK(varve_cache_purge(cache, VARVE_CACHE_KEY, "q", 1) == 0);
    NONE(get(cache, "q"), ENOENT);
    CHECK(varve_cache_release(get(cache, "r")) == 0);
    CHECK(varve_cache_purge(cache, VARVE_CACHE_ALL, NULL, 0) == 0);
    NONE(get(cache, "r"), ENOENT);
    FAILS(varve_cache_purge(cache, VARVE_CACHE_PREFIX, NULL, 0), EINVAL);
    FAILS(varve_cache_purge(cache, 99, "p", 1), EINVAL);
}

/* An object larger than any buffer here goes in and comes out in pieces. */
static void streams(varve_cache *cache)
{
    enum { PIECE = 100000, PIECES = 50 };
    unsigned char *piece = malloc(PIECE);
    varve_cache_stream *stream;
    varve_cache_hit *hit;
    uint64_t at = 0;
    ssize_t read;

    CHECK(piece != NULL);
    CHECK((stream = varve_cache_put_begin(cache, "large", 5, (uint64_t)PIECE * PIECES, NULL)) != NULL);
    for (int n = 0; n < PIECES; n++) {
        memset(piece, n, PIECE);
        CHECK(varve_cache_put_write(stream, piece, PIECE) == 0);
    }
    FAILS(varve_cache_put_write(stream, piece, 1), EMSGSIZE);
    CHECK(varve_cache_put_end(stream) == 0);
    FAILS(varve_cache_put_end(stream), EBADF);

    CHECK((hit = get(cache, "large")) != NULL);
    while ((read = varve_cache_read(hit, piece, 64000, at)) > 0) {
        for (ssize_t n = 0; n < read; n++)
            CHECK(piece[n] == (at + (uint64_t)n) / PIECE);
        at += (uint64_t)read;
    }
    CHECK(read == 0 && at == (uint64_t)PIECE * PIECES && varve_cache_release(hit) == 0);

    CHECK((stream = varve_cache_put_begin(cache, "short", 5, 10, NULL)) != NULL);
    FAILS(varve_cache_put_end(stream), EMSGSIZE);
    CHECK((stream = varve_cache_put_begin(cache, "none", 4, 10, NULL)) != NULL);
    CHECK(varve_cache_put_abort(stream) == 0);
    NONE(get(cache, "none"), ENOENT);
    free(piece);
}

static void related(varve_cache *cache)
{
    varve_cache_object page[] = {
        { .key = "page", .key_len = 4, .body = "<html>", .body_len = 6 },
        { .key = "style", .key_len = 5, .body = "body{}", .body_len = 6 },
    };
    CHECK(varve_cache_put_related(cache, page, 2) == 0);
    CHECK(varve_cache_release(get(cache, "page")) == 0 && varve_cache_release(get(cache, "style")) == 0);
}

static void *many(void *cache)
{
    char key[32], text[32];
    for (int n = 0; n < 500; n++) {
        snprintf(key, sizeof key, "%lx/%d", (unsigned long)pthread_self(), n);
        CHECK(put(cache, key, key, NULL) == 0);
        CHECK(varve_cache_get_range(cache, key, strlen(key), text, sizeof text, 0, NULL) == (ssize_t)strlen(key));
        CHECK(memcmp(key, text, strlen(key)) == 0);
    }
    return NULL;
}

static void threads(varve_cache *cache)
{
    pthread_t all[4];
    for (int n = 0; n < 4; n++)
        CHECK(pthread_create(&all[n], NULL, many, cache) == 0);
    for (int n = 0; n < 4; n++)
        CHECK(pthread_join(all[n], NULL) == 0);
}

static void errors(varve_cache *cache, const char *const *devices)
{
    char long_key[4000] = "";
    const char *missing[] = { "/nonexistent/store" };
    varve_cache_options bad = { .flags = 0x80 };

    FAILS(varve_cache_put(NULL, "k", 1, "v", 1, NULL), EINVAL);
    FAILS(varve_cache_put((varve_cache *)0x1234, "k", 1, "v", 1, NULL), EBADF);
    FAILS(varve_cache_put(cache, NULL, 1, "v", 1, NULL), EFAULT);
    FAILS(varve_cache_put(cache, long_key, sizeof long_key, "v", 1, NULL), ENAMETOOLONG);
    NONE(varve_cache_open(missing, 1, NULL), ENOENT);
    NONE(varve_cache_open(devices, 2, &bad), EINVAL);
    NONE(varve_cache_open(devices, 2, NULL), EWOULDBLOCK);
    FAILS(varve_cache_mkstore(devices, 2, 0, "no-such-policy", 0), EINVAL);
    FAILS(varve_cache_stats(cache, NULL), EFAULT);
}

int main(int argc, char **argv)
{
    char first[4096], second[4096];
    const char *devices[] = { first, second };
    varve_cache_options options = { .hot_bytes = 4 << 20, .flush_ms = 1000 };
    varve_cache_counters counters;
    varve_cache *cache;

    if (argc != 2) {
        fprintf(stderr, "usage: %s DIR\n", argv[0]);
        return 2;
    }
    snprintf(first, sizeof first, "%s/one", argv[1]);
    snprintf(second, sizeof second, "%s/two", argv[1]);
    CHECK(varve_cache_mkstore(devices, 2, 48 << 20, "log-prefetch", 0) == 0);
    FAILS(varve_cache_mkstore(devices, 2, 0, NULL, 0), EEXIST);
    CHECK(varve_cache_mkstore(devices, 2, 0, NULL, VARVE_CACHE_FORCE) == 0);
    CHECK((cache = varve_cache_open(devices, 2, &options)) != NULL);
    objects(cache);
    purges(cache);
    streams(cache);
    related(cache);
    threads(cache);
    errors(cache, devices);
    CHECK(put(cache, "stays", "over a restart", NULL) == 0);
    CHECK(varve_cache_tick(cache) == 0 && varve_cache_flush(cache) == 0);
    CHECK(varve_cache_stats(cache, &counters) == 0);
    CHECK(counters.hits > 2000 && counters.misses > 8 && counters.puts > 2000 && counters.devices_lost == 0);
    CHECK(varve_cache_close(cache) == 0);
    FAILS(varve_cache_flush(cache), EBADF);

    /* Devices come in any order. */
    devices[0] = second, devices[1] = first;
    CHECK((cache = varve_cache_open(devices, 2, NULL)) != NULL);
    CHECK(varve_cache_release(get(cache, "stays")) == 0);
    CHECK(varve_cache_close(cache) == 0);

    /* With one of them missing its keys are missed, the others are there. */
    NONE(varve_cache_open(devices, 1, NULL), EINVAL);
    options.flags = VARVE_CACHE_DEGRADED;
    CHECK((cache = varve_cache_open(devices, 1, &options)) != NULL);
    CHECK(varve_cache_stats(cache, &counters) == 0 && counters.devices_lost == 1);
    CHECK(varve_cache_close(cache) == 0);
    printf("all went well\n");
    return 0;
}
