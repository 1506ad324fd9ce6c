// LevelDB as a program would use it, in the working directory: synced and other writes, overwriting, batches, deletes, a compaction, and a second
// opening; then every key is looked up and counted. Prints what it found, the same on every file system.
#include <leveldb/db.h>
#include <leveldb/write_batch.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>

static void check(const leveldb::Status& status) {
    if (!status.ok()) {
        printf("failed: %s\n", status.ToString().c_str());
        exit(1);
    }
}

static std::unique_ptr<leveldb::DB> open_it() {
    leveldb::DB* db = nullptr;
    leveldb::Options options;
    options.create_if_missing = true;
    options.paranoid_checks = true;
    options.write_buffer_size = 1 << 20;
    options.compression = leveldb::kNoCompression;
    check(leveldb::DB::Open(options, "db", &db));
    return std::unique_ptr<leveldb::DB>(db);
}

int main(int argc, char** argv) {
    const int count = argc > 1 ? atoi(argv[1]) : 10000;
    std::map<std::string, std::string> model;
    unsigned random = 1;
    auto next = [&random] { return random = random * 1664525u + 1013904223u, random >> 8; };
    auto key = [](unsigned n) { char text[32]; snprintf(text, sizeof text, "%016u", n); return std::string(text); };
    auto value = [&next] { return std::string(1 + next() % 1024, static_cast<char>('a' + next() % 26)); };
    auto db = open_it();
    leveldb::WriteOptions sync;
    sync.sync = true;
    for (int i = 0; i < count; i++) {
        std::string v = value();
        check(db->Put(i % 4 == 0 ? sync : leveldb::WriteOptions(), key(i), v));
        model[key(i)] = v;
    }
    for (int i = 0; i < count / 2; i++) {
        leveldb::WriteBatch batch;
        for (int k = 0; k < 3; k++) {
            std::string at = key(next() % count), v = value();
            if (next() % 4 == 0) {
                batch.Delete(at);
                model.erase(at);
            } else {
                batch.Put(at, v);
                model[at] = v;
            }
        }
        check(db->Write(i % 16 == 0 ? sync : leveldb::WriteOptions(), &batch));
    }
    db.reset();
    db = open_it();
    db->CompactRange(nullptr, nullptr);
    long found = 0, bytes = 0;
    for (int i = 0; i < count; i++) {
        std::string v;
        leveldb::Status status = db->Get(leveldb::ReadOptions(), key(i), &v);
        auto expected = model.find(key(i));
        if (status.IsNotFound() != (expected == model.end()) || (status.ok() && v != expected->second)) {
            printf("wrong: key %d\n", i);
            return 1;
        }
        found += status.ok();
        bytes += v.size();
    }
    leveldb::ReadOptions all;
    all.verify_checksums = true;
    std::unique_ptr<leveldb::Iterator> each(db->NewIterator(all));
    long listed = 0;
    for (each->SeekToFirst(); each->Valid(); each->Next()) listed++;
    check(each->status());
    printf("%ld keys, %ld bytes, %ld listed\n", found, bytes, listed);
    return listed != found;
}
