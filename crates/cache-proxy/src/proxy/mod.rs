//! Request dispatch: refuses, tunnels, answers from the store, or passes to an origin.

mod answer;
mod asked;
mod cached;
mod fetch;
mod logged;
mod tunnel;
mod warm;

pub use answer::Answer;
pub use asked::{Asked, Client};
pub use logged::Logged;
pub use warm::Warmed;

use crate::access_log::AccessLog;
use crate::body::Outgoing;
use crate::config::{Config, Limits, Mode};
use crate::flights::Flights;
use crate::headers;
use crate::metrics::{Metrics, Outcome};
use crate::origin::{Asker, Pool, trust};
use crate::seats::{Seat, Seats};
use crate::storage::Storage;
use crate::targets;
use http::{HeaderName, HeaderValue, Method, Request, Response, StatusCode};
use hyper::body::{Body, Incoming};
use parking_lot::RwLock;
use std::hash::{BuildHasher, RandomState};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

/// State that a reload replaces.
pub struct Live {
    /// The configuration.
    pub config: Config,
    /// Origins, by site.
    pub pools: Vec<Arc<Pool>>,
    key_headers: Vec<HeaderName>,
    reverse: Asker,
    forward: Asker,
}

impl Live {
    /// Builds the state for a checked configuration and starts the health checks of its origins.
    ///
    /// # Errors
    /// Trusted certificates cannot be read.
    pub fn new(config: Config) -> std::io::Result<Self> {
        let tls = trust(&config.cache)?;
        let reverse = Asker::new(tls.clone(), &config.limits, None);
        let forward = Asker::new(tls, &config.limits, Some(config.forward.allow_private.clone()));
        let pools: Vec<Arc<Pool>> = config.site.iter().map(|site| Arc::new(Pool::new(site))).collect();
        for (pool, site) in pools.iter().zip(&config.site) {
            if site.health_path.is_some() {
                tokio::spawn(Pool::look_after(
                    Arc::downgrade(pool),
                    reverse.clone(),
                    site.host.clone(),
                ));
            }
        }
        Ok(Self {
            key_headers: config.key_headers(),
            config,
            pools,
            reverse,
            forward,
        })
    }

    const fn limits(&self) -> &Limits {
        &self.config.limits
    }
}

/// The proxy, without its listeners.
pub struct Proxy {
    live: RwLock<Arc<Live>>,
    /// The store of responses.
    pub storage: Arc<Storage>,
    flights: Arc<Flights>,
    seats: Arc<Seats>,
    /// Counters.
    pub metrics: Arc<Metrics>,
    log: AccessLog,
    /// Name in `Via`, unique to this process.
    pseudonym: String,
    /// `Via` of an answer.
    via: HeaderValue,
    started: Instant,
}

impl Proxy {
    /// Makes a proxy over an open store.
    pub fn new(live: Live, storage: Storage, metrics: Arc<Metrics>, log: AccessLog) -> Self {
        let pseudonym = format!("varve-{:08x}", RandomState::new().hash_one(0) as u32);
        Self {
            live: RwLock::new(Arc::new(live)),
            storage: Arc::new(storage),
            flights: Arc::default(),
            seats: Arc::default(),
            metrics,
            log,
            // The name is of letters and digits.
            via: HeaderValue::from_str(&format!("1.1 {pseudonym}"))
                .unwrap_or_else(|_| HeaderValue::from_static("1.1 varve")),
            pseudonym,
            started: Instant::now(),
        }
    }

    /// Returns the configuration in force.
    pub fn live(&self) -> Arc<Live> {
        Arc::clone(&self.live.read())
    }

    /// Replaces the configuration for requests that begin after this call.
    pub fn replace(&self, live: Live) {
        *self.live.write() = Arc::new(live);
        self.log.reopen();
    }

    /// Reserves a slot for a client's connection, or for a tunnel, which outlives its connection.
    pub fn seat(&self, address: IpAddr) -> Option<Seat> {
        self.seats.take(self.live().limits(), &self.metrics, address)
    }

    /// Returns the number of requests that wait for another request's fetch.
    pub fn waiting(&self) -> usize {
        self.flights.waiting()
    }

    /// Returns the number of fetches in progress, and of keys known to have unstorable responses.
    pub fn fetches(&self) -> (usize, usize) {
        (self.flights.len(), self.flights.unstorable())
    }

    /// Returns the seconds since the proxy started.
    pub fn uptime_s(&self) -> u64 {
        self.started.elapsed().as_secs()
    }

    /// Answers one request.
    pub async fn serve(self: Arc<Self>, client: Client, request: Request<Incoming>) -> Response<Logged> {
        let started = Instant::now();
        let line = self.log.is_on().then(|| logged::begin(&client, &request));
        let answer = self.answer(client, request).await;
        let first_byte = started.elapsed();
        self.metrics.request(answer.outcome, first_byte.as_secs_f64());
        let outcome = answer.outcome;
        let status = answer.response.status();
        answer.response.map(|body| {
            let line = line.map(|line| logged::answered(line, status, outcome, first_byte));
            Logged::new(body, line, outcome, started, self)
        })
    }

    /// The ways that lead to an origin are boxed: their state is many times that of a hit, and the HTTP library
    /// moves all of it for each request.
    async fn answer(self: &Arc<Self>, client: Client, request: Request<Incoming>) -> Answer {
        let live = self.live();
        if request.method() == Method::CONNECT {
            return Box::pin(self.tunnel(&live, client, request)).await;
        }
        if request.method() == Method::TRACE {
            return Answer::refuse(StatusCode::METHOD_NOT_ALLOWED, "TRACE is not served.");
        }
        if is_forward(client.mode) && !targets::may_use(client.peer.ip(), &live.config.forward) {
            return Answer::refuse(
                StatusCode::FORBIDDEN,
                "This proxy does not serve your address (forward.clients).",
            );
        }
        let (parts, body) = request.into_parts();
        let asked = match Asked::of(&live, client, parts) {
            Ok(asked) => asked,
            Err(refusal) => return *refusal,
        };
        if let Some(loops) = self.loops(&asked) {
            return loops;
        }
        let has_body = !body.is_end_stream();
        let mut answer = if asked.is_cacheable() && !has_body {
            self.cached(&live, Arc::new(asked)).await
        } else {
            Box::pin(self.pass(&live, &asked, body)).await
        };
        self.finish_headers(&mut answer);
        answer
    }

    /// Refuses a request that has passed through this proxy before.
    fn loops(&self, asked: &Asked) -> Option<Answer> {
        let passed = headers::list(&asked.headers, &http::header::VIA)
            .any(|hop| hop.split_ascii_whitespace().nth(1) == Some(self.pseudonym.as_str()));
        passed.then(|| {
            Answer::refuse(
                StatusCode::LOOP_DETECTED,
                "The request came by here before: an origin points at this proxy.",
            )
        })
    }

    fn finish_headers(&self, answer: &mut Answer) {
        let headers = answer.response.headers_mut();
        headers.append(http::header::VIA, self.via.clone());
    }
}

impl Answer {
    /// Makes an answer that refuses a request.
    pub fn refuse(status: StatusCode, text: &str) -> Self {
        Self::own(status, text, Outcome::Refused)
    }

    fn own(status: StatusCode, text: &str, outcome: Outcome) -> Self {
        let mut response = Response::new(Outgoing::text(format!("{text}\n")));
        *response.status_mut() = status;
        let headers = response.headers_mut();
        headers.insert(
            http::header::CONTENT_TYPE,
            http::HeaderValue::from_static("text/plain; charset=utf-8"),
        );
        headers.insert(
            http::header::CACHE_CONTROL,
            http::HeaderValue::from_static("no-store"),
        );
        Self { response, outcome }
    }
}

/// Whether a mode accepts requests for any target, not only for configured sites.
const fn is_forward(mode: Mode) -> bool {
    matches!(mode, Mode::Forward)
}
