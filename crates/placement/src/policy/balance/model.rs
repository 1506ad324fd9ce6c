//! Mean access time for a spread of demand over devices: mean value analysis of a closed network (Reiser and
//! Lavenberg, 1980). Pure arithmetic.
//!
//! Each device is a queue with a demand `d_k`, the time that its channels spend on one average request,
//! divided by their number; the rest of the service time is delay without queueing (Seidmann's
//! approximation): `z`. With `n` requests in the system
//!
//! ```text
//! r_k(n) = d_k · (1 + q_k(n-1)),   x(n) = n / (z + Σ r_k(n)),   q_k(n) = x(n) · r_k(n)
//! ```
//!
//! With one request this is the sum of the service times, so the fastest device takes all; with many it is
//! the slowest queue, so queues become equal. `balance` needs the whole range between, which equal response
//! times (Wardrop) only approximate.

use crate::DeviceId;

/// Most requests that are iterated over; beyond, the slowest queue dominates.
const REQUESTS_MAX: f64 = 64.0;

/// Demand on each device, in channel × microseconds of all counted accesses.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Demand {
    /// Queueing part, by device.
    pub(super) queue: Vec<f64>,
    /// Delay part, over all devices.
    pub(super) delay: f64,
    /// The counted accesses.
    pub(super) accesses: f64,
}

/// The demand of one unit on one device.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Part {
    pub(super) queue: f64,
    pub(super) delay: f64,
}

impl Part {
    pub(super) fn scaled(self, by: f64) -> Self {
        Self {
            queue: self.queue * by,
            delay: self.delay * by,
        }
    }
}

impl Demand {
    pub(super) fn new(devices: usize) -> Self {
        Self {
            queue: vec![0.0; devices],
            delay: 0.0,
            accesses: 0.0,
        }
    }

    /// Adds a part (or removes it, scaled by -1).
    pub(super) fn add(&mut self, device: DeviceId, part: Part) {
        let queue = &mut self.queue[device.index()];
        *queue = (*queue + part.queue).max(0.0);
        self.delay = (self.delay + part.delay).max(0.0);
    }

    /// Mean time of an access with `requests` in the system after `changes`, in microseconds.
    pub(super) fn response_us(&self, requests: f64, changes: &[(DeviceId, Part)]) -> f64 {
        let per = 1.0 / self.accesses.max(1.0);
        let mut demand = [0.0; DeviceId::MAX];
        let demand = &mut demand[..self.queue.len()];
        for (to, queue) in demand.iter_mut().zip(&self.queue) {
            *to = *queue;
        }
        let mut delay = self.delay;
        for (device, part) in changes {
            demand[device.index()] = (demand[device.index()] + part.queue).max(0.0);
            delay = (delay + part.delay).max(0.0);
        }
        demand.iter_mut().for_each(|queue| *queue *= per);
        solve(demand, delay * per, requests)
    }
}

fn solve(demand: &[f64], delay: f64, requests: f64) -> f64 {
    let requests = requests.clamp(1.0, REQUESTS_MAX);
    let mut queue = [0.0; DeviceId::MAX];
    let (whole, rest) = (requests.floor() as u32, requests.fract());
    let mut response = 0.0;
    let mut step = |n: u32| {
        let mut sum = delay;
        for (q, d) in queue.iter().zip(demand) {
            sum += d * (1.0 + q);
        }
        let rate = f64::from(n) / sum.max(1e-9);
        for (q, d) in queue.iter_mut().zip(demand) {
            *q = rate * d * (1.0 + *q);
        }
        sum
    };
    for n in 1..=whole {
        response = step(n);
    }
    if rest > 0.0 {
        response += rest * (step(whole + 1) - response);
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_request_takes_the_sum_of_the_service_times() {
        assert!((solve(&[3.0, 5.0], 2.0, 1.0) - 10.0).abs() < 1e-9);
    }

    #[test]
    fn many_requests_wait_for_the_slowest_queue() {
        // The rate approaches one over the largest demand.
        let response = solve(&[3.0, 6.0], 0.0, 60.0);
        assert!((60.0 / response * 6.0 - 1.0).abs() < 0.01, "{response}");
    }

    #[test]
    fn equal_queues_follow_the_closed_formula() {
        // Balanced network: x(n) = n / (d · (n + k - 1)).
        for n in [1.0, 2.0, 7.0, 33.0] {
            let response = solve(&[2.0; 4], 0.0, n);
            assert!((response - 2.0 * (n + 3.0)).abs() < 1e-6, "{n}: {response}");
        }
    }

    #[test]
    fn parts_of_requests_lie_between_their_neighbours() {
        let at = |n| solve(&[2.0, 3.0], 1.0, n);
        assert!(at(4.0) < at(4.5) && at(4.5) < at(5.0));
    }
}
