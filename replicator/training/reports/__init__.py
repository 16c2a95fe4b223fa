"""What a run tells of itself: records, notes on compilation, profiles, throughput."""
