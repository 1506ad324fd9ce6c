//! Extent trees and name indexes over checksummed metadata blocks.
