//! Memory tiers: MULTI-CLOCK page tiering and Ingens huge pages.
