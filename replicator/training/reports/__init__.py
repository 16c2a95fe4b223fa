"""Reports of a run: records, compilations, profiles, throughput."""
